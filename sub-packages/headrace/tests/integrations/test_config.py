"""Configs give what the same calls in Python give: Hydra, OmegaConf, LightningCLI; how SkyRL and verl load classes."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import yaml

from headrace.size_aware_batching import (
    BlockwiseSizeAwareBatchSampler,
    BucketBatchSampler,
    BucketedBatching,
    DistributedSizeAwareBatchSampler,
    OptimizerStepBatchSampler,
    PackedCollate,
    PaddedCollate,
    SizeAwareBatchSampler,
)
from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedWebDataModule,
    MapDataModule,
    Remote,
    ResumableLoader,
    RetryPolicy,
    index_shards,
    write_tars,
)
from headrace.weighted_sampler import (
    InterleavedDataset,
    NamedConcatDataset,
    WeightedDistributedSampler,
    cosine_schedule,
)

omegaconf = pytest.importorskip("omegaconf")
PAGE = "how-to/config.md"
SIZES = [1 + 7 * number % 19 for number in range(200)]
SA, WS, WD = "headrace.size_aware_batching", "headrace.weighted_sampler", "headrace.webdatamodule"
GROUPS: dict[str, Any] = {"text": [2, {"web": 3, "books": 1}], "code": 1}
LATER: dict[str, Any] = {"text": (1, {"web": 1, "books": 1}), "code": 1}
BOTH = NamedConcatDataset({"web": range(60), "books": range(40)})
IN_THREE = NamedConcatDataset({"web": range(60), "books": range(40), "code": range(50)})
SAMPLES = [{"x": torch.arange(n), "y": torch.arange(n), "id": n} for n in (3, 5)]


def concat(**sources: int) -> dict[str, Any]:
    """A `NamedConcatDataset` of ranges, as a config has it."""
    datasets = {name: {"_target_": "builtins.range", "_args_": [n]} for name, n in sources.items()}
    return {"_target_": f"{WS}.NamedConcatDataset", "datasets": datasets}


def indices(sampler: Any) -> list[Any]:
    return list(sampler)


def delivered(module: Any) -> list[Any]:
    module.setup("fit")
    return [list(batch) for batch in module.train_dataloader()]


def collated(collate: Any) -> str:
    return str(collate(SAMPLES))


# The path of a class, its arguments in a config, the same in Python where they differ, and what to compare.
ROWS: dict[str, tuple[str, dict[str, Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "budget": (
        f"{SA}.DistributedSizeAwareBatchSampler",
        {"sizes": SIZES, "max_total_size": 40, "work": [float(size**2) for size in SIZES]},
        lambda: DistributedSizeAwareBatchSampler(SIZES, 40, work=[float(size**2) for size in SIZES]),
        indices,
    ),
    "two budgets": (
        f"{SA}.DistributedSizeAwareBatchSampler",
        {"sizes": [[n, 2] for n in SIZES], "max_total_size": [40, 12], "max_length": [15, None]},
        lambda: DistributedSizeAwareBatchSampler([[n, 2] for n in SIZES], (40, 12), max_length=(15, None)),
        indices,
    ),
    "shapes": (
        f"{SA}.DistributedSizeAwareBatchSampler",
        {"sizes": SIZES, "max_total_size": 40, "cost": "padded", "shapes": [[2, 20], [4, 10]]},
        lambda: DistributedSizeAwareBatchSampler(SIZES, 40, cost="padded", shapes=[(2, 20), (4, 10)]),
        indices,
    ),
    "order": (
        f"{SA}.DistributedSizeAwareBatchSampler",
        {"sizes": [4, 2, 3], "max_total_size": 5, "sampler": [2, 1, 0], "strategy": "sequential"},
        lambda: DistributedSizeAwareBatchSampler([4, 2, 3], 5, sampler=[2, 1, 0], strategy="sequential"),
        indices,
    ),
    "steps of tokens": (
        f"{SA}.OptimizerStepBatchSampler",
        {"sizes": SIZES, "max_total_size": 40, "tokens_per_step": [[0, 80], [5, 160]]},
        lambda: OptimizerStepBatchSampler(SIZES, 40, tokens_per_step=[(0, 80), (5, 160)]),
        indices,
    ),
    "blockwise": (
        f"{SA}.BlockwiseSizeAwareBatchSampler",
        {"sizes": [SIZES[:120], SIZES[120:]], "lengths": [120, 80], "max_total_size": 40},
        lambda: BlockwiseSizeAwareBatchSampler([SIZES[:120], SIZES[120:]], 40, lengths=[120, 80]),
        indices,
    ),
    "size-aware": (
        f"{SA}.SizeAwareBatchSampler",
        {"sampler": [0, 1, 2], "sizeof": [1, 2, 3], "max_total_size": 4},
        lambda: SizeAwareBatchSampler([0, 1, 2], [1, 2, 3], 4),
        indices,
    ),
    "buckets": (
        f"{SA}.BucketBatchSampler",
        {
            "sizes": [1, 2, 3, 4],
            "bucket_boundaries": [1, 3, 5],
            "base_batch_sampler_class": {"_target_": "hydra.utils.get_class", "path": "torch.utils.data.BatchSampler"},
            "base_batch_sampler_shared_kwargs": {"drop_last": False},
            "base_batch_sampler_individual_kwargs": {"batch_size": [1, 2]},
            "shuffle": False,
        },
        lambda: BucketBatchSampler(
            [1, 2, 3, 4],
            [1, 3, 5],
            torch.utils.data.BatchSampler,
            {"drop_last": False},
            {"batch_size": [1, 2]},
            shuffle=False,
        ),
        indices,
    ),
    "stream": (
        f"{SA}.BucketedBatching",
        {"sizeof": {"_target_": "hydra.utils.get_method", "path": "builtins.int"}, "max_total_size": 9},
        lambda: BucketedBatching(int, 9),
        lambda stage: list(stage([3, 4, 5, 2, 1])),
    ),
    "padded": (
        f"{SA}.PaddedCollate",
        {"pad_value": {"x": 0, "y": -100}, "fixed": ["id"], "shapes": [[2, 8], [4, 4]]},
        lambda: PaddedCollate({"x": 0, "y": -100}, fixed=["id"], shapes=[(2, 8), (4, 4)]),
        collated,
    ),
    "packed": (
        f"{SA}.PackedCollate",
        {"separator": {"x": 1, "y": -100}, "pad_value": {"x": 0, "y": -100}, "fixed": ["id"], "total_multiple": 4},
        lambda: PackedCollate(
            separator={"x": 1, "y": -100}, pad_value={"x": 0, "y": -100}, fixed=["id"], total_multiple=4
        ),
        collated,
    ),
    "mixture": (
        f"{WS}.WeightedDistributedSampler",
        {"dataset": concat(web=60, books=40), "weights": {"web": 3, "books": 0.5}, "max_passes": {"books": 2}},
        lambda: WeightedDistributedSampler(BOTH, {"web": 3, "books": 0.5}, max_passes={"books": 2}),
        indices,
    ),
    "groups on a schedule": (
        f"{WS}.WeightedDistributedSampler",
        {
            "dataset": concat(web=60, books=40, code=50),
            "weights": GROUPS,
            "schedule": [[30, {"text": [1, {"web": 1, "books": 1}], "code": 1}]],
        },
        lambda: WeightedDistributedSampler(
            IN_THREE,
            dict(GROUPS, text=tuple(GROUPS["text"])),
            schedule=[(30, LATER)],
        ),
        indices,
    ),
    "cosine schedule": (
        f"{WS}.WeightedDistributedSampler",
        {
            "dataset": concat(web=60, books=40),
            "weights": [1, 1],
            "schedule": {
                "_target_": f"{WS}.cosine_schedule",
                "first": {"web": 3, "books": 1},
                "last": {"web": 1, "books": 3},
                "stop": 90,
                "start": 10,
                "stages": 4,
            },
        },
        lambda: WeightedDistributedSampler(
            BOTH,
            [1, 1],
            schedule=cosine_schedule({"web": 3, "books": 1}, {"web": 1, "books": 3}, start=10, stop=90, stages=4),
        ),
        indices,
    ),
    "shares of tokens": (
        f"{WS}.WeightedDistributedSampler",
        {"dataset": concat(web=60, books=40), "weights": {0: 3, 1: 1}, "per": "token", "sizes": SIZES[:100]},
        lambda: WeightedDistributedSampler(BOTH, {0: 3, 1: 1}, per="token", sizes=SIZES[:100]),
        indices,
    ),
    "weight of each sample": (
        f"{WS}.WeightedDistributedSampler",
        {"dataset": {"_target_": "builtins.range", "_args_": [6]}, "weights": [1, 1, 2, 2, 0, 0.5]},
        lambda: WeightedDistributedSampler(range(6), [1, 1, 2, 2, 0, Fraction(1, 2)]),
        indices,
    ),
    "streams": (
        f"{WS}.InterleavedDataset",
        {"sources": {"web": [1, 2, 3], "books": [4, 5, 6]}, "weights": {"web": 3, "books": 1}},
        lambda: InterleavedDataset({"web": [1, 2, 3], "books": [4, 5, 6]}, {"web": 3, "books": 1}),
        indices,
    ),
    "batches of a number": (
        f"{WD}.DistributedBatchSampler",
        {"_args_": [10], "batch_size": 3},
        lambda: DistributedBatchSampler(10, batch_size=3),
        indices,
    ),
    "data module of a list": (
        f"{WD}.MapDataModule",
        {
            "datasets": {"train": [10, 20, 30, 5], "val": [1, 2]},
            "sizes": {"train": [10, 20, 30, 5], "val": [1, 2]},
            "collate_fn": {"_target_": "hydra.utils.get_method", "path": "builtins.list"},
            "num_workers": {"train": 0, "val": 0},
            "batch_sampler": {
                "train": {
                    "_target_": f"{SA}.DistributedSizeAwareBatchSampler",
                    "_partial_": True,
                    "max_total_size": 35,
                },
                "val": {"_target_": f"{SA}.DistributedSizeAwareBatchSampler", "_partial_": True, "max_total_size": 50},
            },
            "accept": ["max_total_size"],
        },
        lambda: MapDataModule(
            {"train": [10, 20, 30, 5], "val": [1, 2]},
            sizes={"train": [10, 20, 30, 5], "val": [1, 2]},
            collate_fn=list,
            batch_sampler={
                "train": partial(DistributedSizeAwareBatchSampler, max_total_size=35),
                "val": partial(DistributedSizeAwareBatchSampler, max_total_size=50),
            },
        ),
        delivered,
    ),
    "loader": (
        f"{WD}.ResumableLoader",
        {
            "dataset": [1, 2, 3, 4, 5],
            "batch_sampler": {
                "_target_": f"{SA}.DistributedSizeAwareBatchSampler",
                "sizes": [1, 2, 3, 4, 5],
                "max_total_size": 6,
            },
            "collate_fn": {"_target_": "hydra.utils.get_method", "path": "builtins.list"},
        },
        lambda: ResumableLoader([1, 2, 3, 4, 5], DistributedSizeAwareBatchSampler([1, 2, 3, 4, 5], 6), collate_fn=list),
        indices,
    ),
    "remote shards": (
        f"{WD}.Remote",
        {"url": ["s3://bucket/a", "s3://bucket/b"], "retry": {"_target_": f"{WD}.RetryPolicy"}},
        lambda: Remote(["s3://bucket/a", "s3://bucket/b"], retry=RetryPolicy()),
        repr,
    ),
}


@pytest.mark.parametrize("convert", ["none", "partial", "all"])
@pytest.mark.parametrize("row", ROWS)
def test_hydra_gives_what_python_gives(row: str, convert: str) -> None:
    hydra = pytest.importorskip("hydra")
    target, arguments, make, compared = ROWS[row]
    config = omegaconf.OmegaConf.create({"_target_": target, "_convert_": convert, **arguments})
    assert compared(hydra.utils.instantiate(config)) == compared(make())


def test_a_parquet_column_is_a_list_of_two(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "lengths.parquet"
    parquet.write_table(arrow.table({"length": SIZES}), file)
    column: Any
    for column in ([str(file), "length"], omegaconf.OmegaConf.create([str(file), "length"])):
        assert list(DistributedSizeAwareBatchSampler(column, 40)) == list(DistributedSizeAwareBatchSampler(SIZES, 40))
        weighted = WeightedDistributedSampler(range(len(SIZES)), column)
        assert list(weighted) == list(WeightedDistributedSampler(range(len(SIZES)), SIZES))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The folder of a project with shards, as the page has them."""
    for name, n in (("web", 60), ("books", 40), ("val", 10)):
        place = tmp_path / "shards" / name
        write_tars([(f"{name}{i:03d}", {"txt": b"x" * (1 + i * 7 % 50)}) for i in range(n)], place, n_shards=2)
        index_shards(place)
    return tmp_path


def collate_list(samples: list[Any]) -> list[Any]:
    return samples


def script(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "train.py", *words], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_in_python(folder: Path) -> IndexedWebDataModule:
    return IndexedWebDataModule(
        {"train": {"web": folder / "shards/web", "books": folder / "shards/books"}, "val": folder / "shards/val"},
        sizes="txt",
        batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=400, cost="padded"),
        sampler=partial(WeightedDistributedSampler, weights={"web": 3, "books": 1}, epoch_length=120),
        collate_fn=lambda samples: [sample["__key__"] for sample in samples],
    )


@pytest.mark.slow
def test_the_page_of_lightning_trains_and_resumes(shards: Path) -> None:
    pytest.importorskip("jsonargparse")
    config = pages.block(PAGE, "lightning config")
    (shards / "fit.yaml").write_text(config)
    noted = pages.block(PAGE, "lightning script").replace(
        "    def training_step(self, batch):\n",
        "    def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        "        import json\n"
        '        with open("keys.txt", "a") as notes:\n'
        '            print(json.dumps([self.trainer.global_step, batch["keys"]]), file=notes)\n\n'
        "    def training_step(self, batch):\n",
    )
    (shards / "train.py").write_text(noted)
    *_, first, again = pages.block(PAGE, "lightning command").replace("\\\n", "").splitlines()
    options = ["--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    script(shards, *first.split()[2:], *options, "--trainer.max_steps", "3")
    script(shards, *again.split()[2:], *options)
    assert "max_total_size: 400" in (shards / "lightning_logs/version_1/config.yaml").read_text()
    saved = ["--config", "lightning_logs/version_1/config.yaml", "--trainer.max_epochs", "4"]
    script(shards, "fit", *saved, "--ckpt_path", "last")
    steps = [json.loads(line) for line in (shards / "keys.txt").read_text().splitlines()]

    module = module_in_python(shards)
    module.setup("fit")
    loader = module.train_dataloader()
    epochs = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        epochs.append(list(loader))
    whole = [batch for epoch in epochs for batch in epoch]
    assert all(whole[step - 1] == keys for step, keys in steps)  # as in Python, also behind the resumes
    assert {step for step, _ in steps} == set(range(1, len(whole) + 1))


def test_lightning_reads_what_it_saved(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    monkeypatch.chdir(shards)
    budget = {"class_path": f"{SA}.DistributedSizeAwareBatchSampler", "init_args": {"max_total_size": 400}}
    options = {
        "shards": {"train": "shards/web", "val": "shards/val"},
        "sizes": {"train": "txt", "val": "txt"},
        "collate_fn": f"{__name__}.collate_list",
        "batch_sampler": {"train": budget, "val": budget},
    }
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(IndexedWebDataModule, "data")
    config = parser.parse_object({"data": {"class_path": f"{WD}.IndexedWebDataModule", "init_args": options}})
    saved = parser.dump(config)
    again = parser.parse_string(saved)
    assert yaml.safe_load(saved) == yaml.safe_load(parser.dump(again))
    module = parser.instantiate(again)["data"]
    assert "batch_sampler={train: DistributedSizeAwareBatchSampler" in repr(module)
    module.setup("fit")
    assert sum(len(batch) for batch in module.train_dataloader()) == 60


@pytest.mark.parametrize("budget", [400, 100])
def test_each_option_on_the_command_line(shards: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    monkeypatch.chdir(shards)
    config = yaml.safe_load(pages.block(PAGE, "lightning config"))["data"]
    config["init_args"]["collate_fn"] = f"{__name__}.collate_list"
    (shards / "data.yaml").write_text(yaml.safe_dump({"data": config}))
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(IndexedWebDataModule, "data")
    option = f"--data.init_args.batch_sampler.init_args.max_total_size={budget}"
    module = parser.instantiate(parser.parse_args(["--config", "data.yaml", option]))["data"]
    module.setup("fit")
    lengths = [[len(sample["txt"]) for sample in batch] for batch in module.train_dataloader()]
    assert 0.5 * budget < max(max(batch) * len(batch) for batch in lengths) <= budget


@pytest.mark.slow
def test_the_page_of_hydra(shards: Path) -> None:
    pytest.importorskip("hydra")
    (shards / "config.yaml").write_text(pages.block(PAGE, "hydra config"))
    (shards / "train.py").write_text(pages.block(PAGE, "hydra script"))
    module = module_in_python(shards)
    module.setup("fit")
    n = len(module.train_dataloader())
    assert script(shards).split() == [str(n), "steps"]
    assert int(script(shards, "data.batch_sampler.max_total_size=800").split()[0]) < n


def test_the_loader_of_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra, arrow = pytest.importorskip("hydra"), pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    parquet.write_table(arrow.table({"length": range(1, 2001)}), "lengths.parquet")
    datasets = {
        "en": {"_target_": "builtins.range", "_args_": [1000]},
        "de": {"_target_": "builtins.range", "_args_": [500]},
        "books": {"_target_": "builtins.range", "_args_": [500]},
    }
    config = omegaconf.OmegaConf.create(
        {
            "data": {"_target_": f"{WS}.NamedConcatDataset", "datasets": datasets},
            "loader": yaml.safe_load(pages.block(PAGE, "hydra loader")),
        }
    )
    loader = hydra.utils.instantiate(config.loader)
    assert sum(len(batch) for batch in loader) == 2000


def function_of(package: str, file: str, name: str, **names: Any) -> Any:
    """A function of a package as it is published, without importing the package, which would need dozens of others."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    source = (Path(spec.submodule_search_locations[0]) / file).read_text()
    wanted = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    if not wanted:
        pytest.skip(f"this version of {package} has no {name}")
    namespace: dict[str, Any] = {**names}
    exec(compile(ast.Module([wanted[0]], []), file, "exec"), namespace)
    return namespace[name]


def loaded_and_resumed(sampler: Any, make: Callable[[], Any], n: int) -> list[int]:
    """The order of a sampler in the loader of both trainers; resumed in the middle it goes on behind the last batch."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(of: Any) -> Any:
        return loaders.StatefulDataLoader(range(n), batch_size=4, sampler=of, drop_last=True, collate_fn=list)

    whole = list(loader(sampler))
    first = loader(make())
    batches = iter(first)
    begun = [next(batches) for _ in range(9)]
    again = loader(make())
    again.load_state_dict(first.state_dict())
    assert begun + list(again) == whole
    return [index for batch in whole for index in batch]


@pytest.fixture
def mixtures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mixtures.py").write_text(pages.block(PAGE, "mixtures"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mixtures", raising=False)
    return tmp_path


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_skyrl_takes_a_mixture(mixtures: Path) -> None:
    import_class = function_of("skyrl", "train/dataset/samplers.py", "import_sampler_class", importlib=importlib)
    config = yaml.safe_load(pages.block(PAGE, "skyrl config"))
    samples = range(10000)

    def make() -> Any:
        return import_class(config["sampler_class_path"])(samples, **config["sampler_kwargs"])

    order = loaded_and_resumed(make(), make, len(samples))
    assert len(order) == 6400
    assert sum(index < 7000 for index in order) == 4800


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_verl_takes_a_mixture(mixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, name: str) -> Any:
        return getattr(importlib.import_module(path.removeprefix("pkg://")), name)

    abstract = function_of(
        "verl",
        "experimental/dataset/sampler.py",
        "AbstractSampler",
        Sampler=torch.utils.data.Sampler,
        abstractmethod=lambda function: function,
        Sized=object,
        DictConfig=object,
    )
    create = function_of(
        "verl", "trainer/main_ppo.py", "create_rl_sampler", load_extern_object=load, AbstractSampler=abstract
    )
    script_of_page = pages.block(PAGE, "verl script").replace("verl.experimental.dataset.sampler", "verl_published")
    (mixtures / "verl_mixtures.py").write_text(script_of_page)
    monkeypatch.delitem(sys.modules, "verl_mixtures", raising=False)
    monkeypatch.setitem(sys.modules, "verl_published", type(sys)("verl_published"))
    sys.modules["verl_published"].AbstractSampler = abstract  # type: ignore[attr-defined]
    config = omegaconf.OmegaConf.create(yaml.safe_load(pages.block(PAGE, "verl config")))

    def make() -> Any:
        return create(config.data, range(10000))

    order = loaded_and_resumed(make(), make, 10000)
    assert len(order) == 6400
    assert sum(index < 7000 for index in order) == 4800
