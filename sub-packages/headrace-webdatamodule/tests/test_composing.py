from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule.composing import calls_of, invoke, stages_of


@pytest.mark.parametrize("stage", [iter, wds.shuffle(10), wds.filters.detshuffle(10), lambda source: source])
def test_one_composable_or_several(stage: Any) -> None:
    assert stages_of("p", stage) == [stage]
    assert stages_of("p", (stage, iter)) == [stage, iter]
    assert stages_of("p", iter([stage])) == [stage]


@pytest.mark.parametrize("given", [5, "shuffle", [iter, 5], {"shuffle": iter}])
def test_what_is_no_composable_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="p must be one or several callables"):
        stages_of("p", given)


@pytest.mark.parametrize("given", ["shuffle", ["shuffle"], [("shuffle",)], [("a", 5)], {"a": {}}])
def test_what_is_no_call_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="pairs of method name and kwargs"):
        calls_of("invoke_wds", given)


def test_calls_are_made_one_after_the_other() -> None:
    pipeline = wds.DataPipeline(lambda: iter([1, 2, 3]))
    calls = calls_of("i", [("with_epoch", {"nbatches": 4}), ("with_length", {"n": 4, "silent": True})])
    made = invoke("i", pipeline, calls)
    assert list(made) == [1, 2, 3, 1]
    assert len(made) == 4


@pytest.mark.parametrize("method", ["_run", "__class__", "with_epok"])
def test_a_method_that_is_not_there(method: str) -> None:
    with pytest.raises(ValueError, match=rf"invoke_wds: DataPipeline has no method '{method}'"):
        invoke("invoke_wds", wds.DataPipeline([1]), [(method, {})])


def test_a_slip_of_the_pen_gets_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean with_epoch"):
        invoke("invoke_wds", wds.DataPipeline([1]), [("with_epok", {})])
