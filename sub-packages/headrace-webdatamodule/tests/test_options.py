import inspect
from typing import Any

import pytest
import webdataset as wds
from torch.utils.data import DataLoader

from headrace.webdatamodule import Split, WebDataModule, write_tars
from headrace.webdatamodule.options import check_options_wds, check_options_wld


def test_every_option_of_the_wrapped_classes_passes() -> None:
    for check, target, taken in (
        (check_options_wds, wds.WebDataset, {"urls"}),
        (check_options_wld, DataLoader, {"dataset", "batch_size"}),
    ):
        options = dict.fromkeys(set(inspect.signature(target).parameters) - taken)
        assert check("n", options) == options
        assert check("n", options) is not options


@pytest.mark.parametrize(
    ("check", "option", "message"),
    [
        (check_options_wds, "nope", "n: WebDataset has no option 'nope'; it takes handler, mode, .*, seed$"),
        (check_options_wds, "shardshufle", "no option 'shardshufle'; did you mean 'shardshuffle'"),
        (check_options_wds, 5, "no option 5"),
        (check_options_wds, "self", "no option 'self'"),
        (check_options_wld, "num_worker", "n: DataLoader has no option 'num_worker'; did you mean 'num_workers'"),
        (check_options_wld, "batch_size", "n cannot hold 'batch_size'"),
    ],
)
def test_other_options_are_named(check: Any, option: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check("n", {option: 1})


@pytest.mark.parametrize("name", ["kwargs_wds", "kwargs_wld"])
def test_the_data_module_says_which_argument_is_wrong(tmp_path: Any, name: str) -> None:
    write_tars([("a", {"json": b"1"})], tmp_path, n_shards=1)
    options: Any = {name: {Split.train: {"nope": 1}}}
    module = WebDataModule({Split.train: 1}, "json", {Split.train: tmp_path}, 1, **options)
    with pytest.raises(ValueError, match=rf"{name}\[Split.train\]: \w+ has no option 'nope'; it takes "):
        module.setup("fit")
