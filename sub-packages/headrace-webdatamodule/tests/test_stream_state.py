"""States that fit, and those that are refused."""

from typing import Any

import pytest

from headrace.webdatamodule.streaming.state import Stream, check_state

STREAM = Stream("train", 10, 2, 3, {"seed": "4", "shards": "ab"})
STATE: dict[str, Any] = {
    "version": 1,
    "epoch": 5,
    "position": 7,
    "ranks": 2,
    "workers": 3,
    "dropped": False,
    "fingerprint": {"seed": "4", "shards": "ab"},
}


def test_a_state_that_fits() -> None:
    assert check_state(STATE, STREAM) == STATE
    assert check_state({**STATE, "position": 99}, STREAM._replace(batches=None))["position"] == 99


@pytest.mark.parametrize("position", [0, 10])
def test_at_the_end_of_an_epoch_other_numbers_go_on(position: int) -> None:
    state = {**STATE, "fingerprint": {**STATE["fingerprint"], "pipeline_wds": "batched(2)"}}
    stream = STREAM._replace(fingerprint={**STREAM.fingerprint, "pipeline_wds": "batched(4)"})
    assert check_state({**state, "position": position, "ranks": 8, "workers": 0}, stream)["ranks"] == 8
    with pytest.raises(ValueError, match=r"pipeline_wds was batched\(2\) in it and is batched\(4\) here"):
        check_state(state, stream)
    with pytest.raises(ValueError, match="seed was 4 in it and is 5 here"):
        check_state({**state, "position": position}, stream._replace(fingerprint={"seed": "5", "shards": "ab"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fingerprint": {"seed": "3", "shards": "ab"}},
            "of another order: seed was 3 in it and is 4 here. Resume with",
        ),
        ({"fingerprint": {"seed": "4"}}, "shards was nothing in it and is ab here"),
        ({"fingerprint": {**STATE["fingerprint"], "mix": "x"}}, "mix was x in it and is nothing here"),
        ({"position": 11}, "stands at batch 11 of an epoch of 10"),
        ({"ranks": 4}, "batch 7 of epoch 5 of 4 ranks with 3 workers, here are 2 ranks with 3.*IndexedWebDataModule"),
        ({"workers": 0}, "of 2 ranks with 0 workers"),
        ({"version": 2}, "version 2, this release reads version 1"),
        ({"position": -1}, "position of the state must be an int"),
        ({"epoch": True}, "epoch of the state must be an int"),
        ({"dropped": 1}, "dropped a bool"),
        ({"fingerprint": "ab"}, "must be a mapping"),
        ({"more": 1}, "must be a mapping with version, epoch"),
    ],
)
def test_states_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"train: .*{message}"):
        check_state({**STATE, **change}, STREAM)


def test_no_mapping() -> None:
    with pytest.raises(TypeError, match="got list"):
        check_state([], STREAM)
