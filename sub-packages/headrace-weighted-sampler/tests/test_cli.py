"""The command says what the sampler then does."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler
from headrace.weighted_sampler import cli as module
from headrace.weighted_sampler.cli import main, read_sizes

COMMAND = [sys.executable, "-m", "headrace.weighted_sampler.cli"]
COUNTS = {"web": 900, "books": 60, "code": 130}
NAMES = list(COUNTS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sizes of three sources, and one without samples."""
    rng = np.random.default_rng(0)
    for name, scale in (("web", 100), ("books", 900), ("code", 300)):
        np.save(tmp_path / f"{name}.npy", 1 + rng.geometric(1 / scale, COUNTS[name]))
    np.savetxt(tmp_path / "web.txt", np.load(tmp_path / "web.npy"), "%d")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    try:
        code = main([str(word) for word in words])
    except SystemExit as ended:
        code = int(str(ended.code))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("headrace-mixtures: error: ")
    assert err.count("\n") == 1
    return err


def reported(capsys: pytest.CaptureFixture[str], config: dict[str, Any], *words: object) -> dict[str, Any]:
    Path("config.json").write_text(json.dumps(config))
    report: dict[str, Any] = json.loads(printed(capsys, "--config", "config.json", "--json", *words))["report"]
    return report


def real_order(sampler: WeightedDistributedSampler, samples: int) -> np.ndarray[Any, Any]:
    """The first samples of the run, over as many epochs as that takes."""
    epochs = []
    for epoch in range(-(-samples // sampler.epoch_length)):
        sampler.set_epoch(epoch)
        epochs.append(sampler.take(0, sampler.epoch_length))
    return np.concatenate(epochs)[:samples]


FILES = {name: f"{name}.npy" for name in NAMES}
CASES: dict[str, dict[str, Any]] = {
    "tokens": {"weights": {"web": 3, "books": 1, "code": 1}},
    "samples": {"weights": {"web": 3, "books": 1, "code": 1}, "per": "sample", "seed": 5},
    "ratios": {"weights": {"web": 0.5, "books": 3, "code": 1}, "semantics": "ratio"},
    "counts of tokens": {"weights": {"web": 60000, "books": 20000, "code": 9000}, "semantics": "count"},
    "a temperature": {"semantics": "temperature", "temperature": 2.5},
    "a group": {"weights": {"web": 0.6, "rest": [0.4, {"books": 1, "code": 3}]}},
    "a source of weight 0": {"weights": {"web": 1, "books": 0, "code": 0.25}, "epoch_length": 77},
    "caps": {"weights": {"web": 3, "books": 2, "code": 1}, "max_passes": {"books": 3, "code": 2}},
    "caps by samples": {"weights": {"web": 3, "books": 2, "code": 1}, "max_passes": {"books": 3}, "per": "sample"},
    "a schedule": {
        "weights": {"web": 1, "books": 0, "code": 0},
        "schedule": [[300, {"web": 1, "books": 1, "code": 0}], [1001, {"web": 0, "books": 1, "code": 2}]],
    },
    "a schedule and caps by samples": {
        "weights": {"web": 1, "books": 0, "code": 0},
        "schedule": [[300, {"web": 1, "books": 1, "code": 0}], [1001, {"web": 1, "books": 1, "code": 2}]],
        "max_passes": {"books": 4},
        "per": "sample",
    },
    "exhausted sources": {"weights": {"web": 1, "books": 1, "code": 1}, "stopping": "drop_exhausted"},
    "exhausted sources by samples": {
        "weights": {"web": 1, "books": 0, "code": 1},
        "stopping": "drop_exhausted",
        "per": "sample",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_samplers_order(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config: dict[str, Any] = {"sources": FILES, "seed": 1, **CASES[case]}
    sizes = np.concatenate([np.load(file) for file in FILES.values()])
    per = config.get("per", "sample" if case == "ratios" else "token")
    sampler = WeightedDistributedSampler(
        NamedConcatDataset({name: range(count) for name, count in COUNTS.items()}),
        num_replicas=1,
        rank=0,
        sizes=sizes if per == "token" else None,
        **{name: value for name, value in config.items() if name not in ("sources", "per")},
        per=per,
    )
    most = 5000
    order = real_order(sampler, most)
    sources = np.repeat(np.arange(3), list(COUNTS.values()))[order]
    tokens = np.cumsum(sizes[order])
    leaving = dict(sampler.report().leaving)
    for samples in (1, 299, 1002, sampler.epoch_length, most - 1):
        by_tokens = int(tokens[samples - 1])  # every sample has a token
        for length in ({"samples": samples}, {"tokens": by_tokens}, {"tokens": by_tokens + 1}):
            end = samples + (length.get("tokens") == by_tokens + 1)
            report = reported(capsys, config | length)
            assert (report["samples"], report["tokens"]) == (end, tokens[end - 1])
            assert report["epoch_length"] == sampler.epoch_length
            for place, (name, line) in enumerate(zip(NAMES, report["sources"], strict=True)):
                own = order[:end][sources[:end] == place]
                assert line["name"] == name
                assert line["samples"] == COUNTS[name]
                assert line["drawn_samples"] == len(own)
                assert line["drawn_tokens"] == sizes[own].sum()
                assert line["sample_share"] == pytest.approx(len(own) / end)
                assert line["token_share"] == pytest.approx(sizes[own].sum() / tokens[end - 1])
                assert line["passes"] == pytest.approx(len(own) / COUNTS[name])
                assert line["repeated_share"] == pytest.approx(1 - len(np.unique(own)) / len(own) if len(own) else 0)
                assert line["leaves_at_position"] == (leaving.get(name) if leaving.get(name, most) < end else None)
            assert sum(line["asked_share"] for line in report["sources"]) == pytest.approx(1)
            repeated = 1 - len(np.unique(order[:end])) / end
            assert report["repeated_share"] == pytest.approx(repeated)


@pytest.mark.parametrize("case", CASES)
def test_the_asked_shares_are_those_that_are_delivered(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = reported(capsys, {"sources": FILES, "epochs": 40} | CASES[case])
    by = "sample_share" if "samples" in case or case == "ratios" else "token_share"
    for line in report["sources"]:
        # Where a source is exhausted, its last draw of an epoch may be one too many: of few samples, half a per cent.
        assert line["asked_share"] == pytest.approx(line[by], abs=5e-3 if "exhausted" in case else 2e-3), line["name"]


def test_the_shares_of_an_epoch_are_those_of_the_samplers_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"sources": FILES, "weights": {"web": 3, "books": 1, "code": 1}, "epochs": 1}
    lines = reported(capsys, config)["sources"]
    sampler = WeightedDistributedSampler(
        NamedConcatDataset({name: range(count) for name, count in COUNTS.items()}),
        config["weights"],  # type: ignore[arg-type]  # of a config
        num_replicas=1,
        rank=0,
        per="token",
        sizes=np.concatenate([np.load(file) for file in FILES.values()]),
    )
    for line, source in zip(lines, sampler.report().sources, strict=True):
        assert (line["drawn_samples"], line["asked_share"]) == (source.draws, source.asked_token_share)
        assert line["token_share"] == pytest.approx(source.token_share)
        assert line["passes"] == pytest.approx((source.seen + source.repeats) / source.size)


def test_an_empty_source_of_weight_0_is_allowed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--per", "sample"]):
        out = printed(capsys, "web=900", "none=0", "--weights", "web=1", "none=0", "--samples", 1000, *words)
        assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["web", "900"], ["none", "0"]]


# -- Steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 7])
def test_steps_of_samples_are_those_of_a_loader(ranks: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"web": 3, "books": 1, "code": 1}
    config: dict[str, Any] = {"sources": COUNTS, "weights": weights, "epoch_length": 500, "batch_size": 8}
    config |= {"num_replicas": ranks, "max_passes": {"books": 5}}
    data = NamedConcatDataset({name: range(count) for name, count in COUNTS.items()})
    sampler = WeightedDistributedSampler(data, weights, ranks, 0, epoch_length=500, max_passes={"books": 5})
    steps = len(DataLoader(data, batch_size=8, sampler=sampler))
    report = reported(capsys, config | {"epochs": 4})
    assert report["steps"] == 4 * steps
    assert reported(capsys, config | {"samples": 4 * 500 - 40 * ranks})["steps"] == 4 * steps - 5
    [(name, position)] = sampler.report().leaving
    epoch, offset = divmod(position, 500)
    at = next(line for line in report["sources"] if line["name"] == name)
    assert at["leaves_at_position"] == position
    assert at["leaves_at_step"] == epoch * steps + offset // (8 * ranks)
    assert epoch == 2


def test_steps_of_tokens_have_full_batches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"sources": FILES, "weights": {"web": 3, "books": 1, "code": 1}, "max_passes": {"books": 2}}
    config |= {"tokens": 600_000}
    report = reported(capsys, config, "--batch-tokens", 4096, "--num-replicas", 2)
    assert report["steps"] == -(-report["tokens"] // 8192) == 74
    books = report["sources"][1]
    before = reported(capsys, config | {"tokens": None, "samples": books["leaves_at_position"]})
    assert books["leaves_at_step"] == before["tokens"] // 8192
    assert "74 steps if every batch has 4,096 tokens on 2 ranks" in printed(
        capsys, "--config", "config.json", "--tokens", 600_000, "--batch-tokens", 4096, "--num-replicas", 2
    )


# -- Input and output ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_of_the_command(folder: Path) -> None:
    words = ["web=web.txt", "books=books.npy", "--weights", "web=3", "books=1", "--tokens", "400_000"]
    words += ["--max-passes", "books=1", "--batch-size", "4", "--num-replicas", "2"]
    done = subprocess.run([*COMMAND, *words], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    run, steps, heads, web, books, total = done.stdout.splitlines()
    assert run.endswith("epochs of 960 samples")
    assert steps.endswith("steps of 4 samples on 2 ranks")
    assert heads.split("  ")[0] == "source"
    assert [line.split()[0] for line in (web, books, total)] == ["web", "books", "total"]
    assert books.split()[1:4] == ["60", f"{np.load('books.npy').sum():,}", "1"]
    assert "75.00%" not in web, "the cap changes the shares"


def test_the_flags_say_the_same_as_a_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["web=web.npy", "books=books.npy", "--weights", "web=3", "books=0.5", "--epochs", "3", "--seed", "7"]
    words += ["--epoch-length", "100", "--max-passes", "books=1", "--per", "sample", "--semantics", "proportion"]
    words += ["--stopping", "endless", "--batch-size", "4", "--num-replicas", "2", "--json"]
    out = json.loads(printed(capsys, *words))
    config = {
        "sources": {"web": "web.npy", "books": "books.npy"},
        "weights": {"web": 3, "books": 0.5},
        "epochs": 3,
        "seed": 7,
        "epoch_length": 100,
        "max_passes": {"books": 1},
        "per": "sample",
        "semantics": "proportion",
        "stopping": "endless",
        "batch_size": 4,
        "num_replicas": 2,
    }
    assert {name: value for name, value in out.items() if name != "report"} == config
    assert reported(capsys, config) == out["report"]
    words = ["web=900", "books=60", "--semantics", "temperature", "--temperature", "2", "--samples", "1e3", "--json"]
    out = json.loads(printed(capsys, *words))
    assert (out["temperature"], out["samples"], out["per"]) == (2, 1000, "sample")
    assert out["report"]["tokens"] is None


@pytest.mark.parametrize("case", CASES)
def test_the_output_can_be_the_input(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"sources": FILES, "tokens": 50_000, "batch_tokens": 500, "num_replicas": 2} | CASES[case]
    Path("config.json").write_text(json.dumps(config))
    first = printed(capsys, "--config", "config.json", "--json")
    Path("again.json").write_text(first)
    assert printed(capsys, "--config", "again.json", "--json") == first
    assert json.loads(first).items() >= config.items()


def test_what_is_on_the_command_line_replaces_the_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"sources": FILES, "weights": {"web": 3, "books": 1, "code": 1}, "tokens": 1000, "batch_tokens": 100}
    Path("config.json").write_text(json.dumps(config))
    words = ["web=web.txt", "--weights", "books=2", "--epochs", "2", "--batch-size", "10", "--json"]
    out = json.loads(printed(capsys, "--config", "config.json", *words))
    assert out["sources"] == FILES | {"web": "web.txt"}
    assert out["weights"] == {"web": 3, "books": 2, "code": 1}
    assert (out["epochs"], out["batch_size"]) == (2, 10)
    assert not {"tokens", "batch_tokens"} & set(out)


def test_a_config_in_yaml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    Path("mixture.yaml").write_text(
        "sources:\n  web: web.npy\n  books: books.npy\n  code: code.npy\n"
        "weights:\n  web: 3\n  rest: [1, {books: 1, code: 2}]\n"
        "tokens: 1e5  # text to YAML\nmax_passes: {books: 2}\nschedule:\n- [2_000, {web: 1, books: 1, code: 1}]\n"
    )
    out = json.loads(printed(capsys, "--config", "mixture.yaml", "--json"))
    assert out["tokens"] == 100_000
    config = {name: value for name, value in out.items() if name != "report"}
    assert reported(capsys, config) == out["report"]
    assert "first weight" in printed(capsys, "--config", "mixture.yaml")  # a schedule changes it
    Path("mixture.yaml").write_text("sources: [")
    assert "mixture.yaml: it is not YAML" in refused(capsys, "--config", "mixture.yaml")


def test_yaml_needs_pyyaml(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # as if it were not installed
    Path("mixture.yml").write_text("tokens: 1\n")
    assert "YAML needs PyYAML, which is not installed: pip install pyyaml, or write the config as .json" in refused(
        capsys, "--config", "mixture.yml"
    )


def test_a_mixture_of_counts_has_no_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["web=web.npy", "books=60", "--weights", "web=1", "books=1"]
    out = printed(capsys, *words, "--samples", 100)
    assert "token" not in out
    for more in (["--tokens", 100], ["--samples", 9, "--batch-tokens", 9], ["--samples", 9, "--per", "token"]):
        assert "needs sizes of all sources, and of 'books' there is only a count" in refused(capsys, *words, *more)


@pytest.mark.slow
def test_the_plot_covers_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = ["web=web.npy", "books=books.npy", "--weights", "web=3", "books=1", "--samples", 5000]
    for more in (["--max-passes", "books=2"], ["--stopping", "drop_exhausted"]):
        printed(capsys, *words, *more, "--plot", "run.png")
        assert Path("run.png").read_bytes().startswith(b"\x89PNG")
        Path("run.png").unlink()
    assert "run.xyz" in refused(capsys, *words, "--plot", "run.xyz") or not Path("run.xyz").exists()


def test_the_plot_needs_its_extra(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    words = ["web=900", "--weights", "web=1", "--samples", 10, "--plot", "run.png"]
    assert "pip install 'headrace-weighted-sampler[plot]'" in refused(capsys, *words)


SIZED = ["web=web.npy", "--weights", "web=1"]
TEN = ["--samples", "10"]


def test_a_folder_of_shards_in_the_place_of_sizes_names_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("shards").mkdir()
    told = refused(capsys, "web=shards", "--weights", "web=1", "--samples", "10")
    assert "got a directory: of shards, `headrace-shards sizes shards MEMBER > shards.txt` writes one" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["web=none.npy", "--weights", "web=1", *TEN], "none.npy: No such file or directory"),
        (["web=web.csv", "--weights", "web=1", *TEN], "web.csv: sizes must be in a .npy or .txt file"),
        (["web=web.npy", "--weights", "web=1", "wb=2", *TEN], "weights names 'wb', which the dataset does not have"),
        (["books=5", *SIZED, *TEN], "weights lacks 'books'"),
        (["web", "--weights", "web=1", *TEN], "must be NAME=VALUE, got 'web'"),
        (["web=4", "web=5", "--weights", "web=1", *TEN], "sources names 'web' twice"),
        (["web=-4", "--weights", "web=1", *TEN], "sources['web'] must be an int from 0 to"),
        (["web=4", "--weights", "web=heavy", *TEN], "--weights 'web=heavy': got 'heavy', expected a number"),
        (["web=4", "--weights", "web=-1", *TEN], "must not be negative"),
        (["web=4", "--weights", "web=nan", *TEN], "expected a number"),
        (["web=4", *TEN], "weights must be given unless semantics='temperature'"),
        ([*SIZED], "the length of the run must be given: --tokens, --samples or --epochs"),
        ([*SIZED, "--samples", "0"], "samples must be an int from 1"),
        ([*SIZED, "--samples", "1.5"], "got '1.5', expected a whole number of 0 or more"),
        ([*SIZED, "--samples", "1", "--tokens", "1"], "not allowed with argument --samples"),
        ([*SIZED, *TEN, "--batch-size", "1", "--batch-tokens", "1"], "not allowed with argument --batch-size"),
        ([*SIZED, *TEN, "--max-passes", "wb=2"], "max_passes names 'wb'"),
        ([*SIZED, *TEN, "--max-passes", "web=0"], "max_passes['web'] must be an int >= 1"),
        ([*SIZED, *TEN, "--max-passes", "web=2"], "max_passes ends the mixture"),
        ([*SIZED, *TEN, "--temperature", "2"], "semantics='temperature' needs temperature"),
        ([*SIZED, *TEN, "--semantics", "ratio", "--per", "token"], "no effect with semantics='ratio'"),
        ([*SIZED, *TEN, "--per", "word"], "invalid choice: 'word'"),
        ([*SIZED, *TEN, "--num-replicas", "0"], "num_replicas must be an int from 1"),
        ([*SIZED, *TEN, "--config", "none.json"], "none.json: No such file or directory"),
        ([*SIZED, *TEN, "--config", "web.npy"], "web.npy: --config must be a .json or .yaml file"),
        ([], "sources must be NAME=SIZES or NAME=COUNT"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "it is not JSON"),
        ("[1]", "a config must be a mapping of fields, got [1] (list)"),
        ({"source": {"web": 5}}, "a config has no 'source'; its fields are sources, weights"),
        ({"sources": ["web.npy"]}, "sources must be NAME=SIZES"),
        ({"sources": {"web": True}, "samples": 5}, "sources['web'] must be an int from 0"),
        ({"sources": {"web": 5}, "samples": "many"}, "samples must be an int from 1"),
        ({"sources": {"web": 5}, "samples": 5, "epochs": 1}, "samples and epochs were both given"),
        ({"sources": {"web": 5}, "samples": 5, "batch_size": 1, "batch_tokens": 1}, "batch_size were both given"),
        ({"sources": {"web": 5}, "samples": 5, "max_passes": [1]}, "max_passes must be a mapping"),
        ({"sources": {"web": 5}, "samples": 5, "schedule": "later"}, "schedule must be a list of pairs"),
        ({"sources": {"web": 5}, "samples": 5, "weights": {"web": 1}, "schedule": [5]}, "schedule must be a list"),
        ({"sources": {"web": 5}, "samples": 5, "weights": {"web": 1}, "stopping": "soon"}, "stopping must be one of"),
        ({"sources": {"web": 5}, "samples": 5, "weights": {"web": 1}, "seed": -1}, "seed must be an int from 0"),
        ({"sources": {"web": 5}, "samples": 5, "weights": 3}, "weights must be a mapping"),
        ({"sources": {"web": 5}, "epochs": 1e18, "weights": {"web": 1}}, "the run must be an int from 1"),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(
    config: str | dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert message in refused(capsys, "--config", "config.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", np.array([3, -3]), "a.npy: sizes must be whole numbers from 0 to 2**32, got -3 for sample 1"),
        ("a.npy", np.array([3, 1.5]), "a.npy: sizes must be whole numbers from 0 to 2**32, got 1.5 for sample 1"),
        ("a.npy", np.array([np.nan]), "a.npy: sizes must be whole numbers from 0 to 2**32, got nan for sample 0"),
        ("a.npy", np.array([2**33]), "got 8589934592 for sample 0"),
        ("a.npy", np.ones((2, 2)), "a.npy: sizes must be numbers in one dimension, one a sample, got float64"),
        ("a.npy", np.array(["x"]), "a.npy: sizes must be numbers in one dimension"),
        (
            "a.npy",
            np.zeros(0),
            "a.npy: sizes must be numbers in one dimension, one a sample, got float64 of shape (0,)",
        ),
        ("a.npy", b"PK", "a.npy: it does not begin as a .npy file does"),
        ("a.npy", b"\x93NUMPY\1\0", "a.npy: "),
        ("a.txt", b"3\n-3\n", "a.txt: line 2: sizes must be whole numbers from 0 to 2**32, got -3"),
        ("a.txt", b"3\nfour\n", "a.txt: line 2: expected one whole number, got 'four'"),
        ("a.txt", b"", "a.txt: sizes must be numbers"),
        ("a.txt", b"\xff\xfe", "a.txt: it is not text in UTF-8"),
        ("a.txt", b"0\n0\n", "sizes of 'web' are all 0"),
    ],
)
def test_wrong_sizes_are_refused_in_one_line(
    name: str,
    content: bytes | np.ndarray[Any, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.save(tmp_path / name, content)
    assert message in refused(capsys, f"web={tmp_path / name}", "--weights", "web=1", "--tokens", 5)


def test_whole_floats_and_narrow_integers_are_sizes(tmp_path: Path) -> None:
    for dtype in (np.float32, np.uint8, np.int64):
        np.save(tmp_path / "a.npy", np.array([3, 200], dtype))
        assert read_sizes(tmp_path / "a.npy").tolist() == [3, 200]
        assert read_sizes(tmp_path / "a.npy").dtype == np.int64


def test_tokens_that_no_run_reaches_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("0\n0\n")
    words = [f"web={tmp_path / 'a.txt'}", "--weights", "web=1", "--tokens", "5", "--per", "sample"]
    for more in ([], ["--stopping", "drop_exhausted"]):
        assert "does not reach 5 tokens" in refused(capsys, *words, *more)


def test_a_huge_mixture_takes_no_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["web=1_000_000_000_000", "books=70_000_000_000", "--weights", "web=9", "books=1", "--json"]
    report = json.loads(printed(capsys, *words, "--samples", 10**15, "--max-passes", "books=1"))["report"]
    assert report["sources"][1]["drawn_samples"] == 70 * 10**9
    np.save(tmp_path / "a.npy", np.full(1000, 7))
    words = [f"web={tmp_path / 'a.npy'}", "--weights", "web=1", "--tokens", "1e15", "--json"]
    report = json.loads(printed(capsys, *words))["report"]
    assert report["samples"] == -(-(10**15) // 7)


def test_the_version_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for word, told in (("--version", version("headrace-weighted-sampler")), ("--help", "--max-passes")):
        with pytest.raises(SystemExit, match="0"):
            main([word])
        assert told in capsys.readouterr().out


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_report", interrupt)
    assert main(["web=5", "--weights", "web=1", "--samples", "5"]) == 130


@pytest.mark.slow
def test_a_reader_that_stops_is_no_error(tmp_path: Path) -> None:
    sources = {f"source{number}": 1000 + number for number in range(2000)}
    weights = dict.fromkeys(sources, 1)
    (tmp_path / "many.json").write_text(json.dumps({"sources": sources, "weights": weights, "samples": 9}))
    words = [*COMMAND, "--config", str(tmp_path / "many.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(9) == b"9 samples"
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 0
