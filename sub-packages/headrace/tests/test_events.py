"""A run survives whatever happens to it: real loops on one to four real ranks, killed, resumed and changed at random.

What happens in which loop, beside a kill of all ranks at a random batch and a resume from the last checkpoint, on
another number of ranks, with other options of the batches, and with appended samples:

| loop | exclude, skip | reshard |
|---|---|---|
| plain | in the running processes | in the running processes: some join, some leave |
| Lightning, with a data module | in the running processes | no: the trainer has the process group |
| Fabric | in the running processes | no: Fabric has the process group |

`integrations/test_events_of_loops.py` has the loops that need other libraries.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import events_worker
import pytest
from events_run import BY_COUNT, BY_SIZE, Loop, Run, check_run

pytestmark = [pytest.mark.slow]

LOOPS = {
    "plain": Loop(events_worker.plain, ("exclude", "skip", "reshard")),
    "lightning": Loop(events_worker.lightning_module),
    "fabric": Loop(events_worker.fabric),
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
