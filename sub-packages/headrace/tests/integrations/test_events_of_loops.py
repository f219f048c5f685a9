"""A run survives whatever happens to it, in the training loops of other libraries; see `../test_events.py`.

| loop | exclude, skip | reshard |
|---|---|---|
| accelerate, with a registered loader | in the running processes | no: the accelerator has the process group |
| Hugging Face's `Trainer`, with a `TrainerLoader` | in the running processes | no: the trainer has the process group |
| torchdata's `StatefulDataLoader` | in the running processes, without workers | no |
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import events_loops
import pytest
from events_run import BY_COUNT, BY_SIZE, Loop, Run, check_run
from runs import SERVER

pytestmark = [pytest.mark.slow]
SERVER.set_forkserver_preload(["resume_worker", "events_loops"])
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])

LOOPS = {
    "accelerate": Loop(events_loops.registered),
    "hf_trainer": Loop(events_loops.hf_trainer),
    "stateful": Loop(events_loops.stateful, with_workers=()),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("choices", [pytest.param(BY_SIZE, id="by-size"), pytest.param(BY_COUNT, id="by-count")])
@pytest.mark.parametrize("events", [12, pytest.param(170, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)])])
def test_nothing_is_lost_or_repeated_whatever_happens(
    loop: str,
    choices: dict[str, list[Any]],
    events: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    check_run(Run(LOOPS[loop], tmp_path, request.config.option.seed, choices), events, record_property)
