"""Every way that a text could take to a shell."""

from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule import Split, WebDataModule, write_tars
from headrace.webdatamodule.urls import check_place, local_directory, scheme_of, shard_urls

SAMPLES = [(f"s{i}", {"json": b"%d" % i}) for i in range(4)]


def module(place: Any, **options: Any) -> WebDataModule:
    return WebDataModule({Split.train: 4}, "json", {Split.train: place}, 1, **options)


def read(made: WebDataModule) -> list[Any]:
    made.setup("fit")
    return list(made.train_dataloader())


@pytest.mark.parametrize("url", ["pipe:touch ran", "PIPE:touch ran", " pipe:touch ran", "pipe:touch ran |/"])
def test_pipes_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"dirs_tars_wds\[Split.train\] is .*shell.*allow_pipe=True"):
        module(url)


@pytest.mark.parametrize("url", ["http://a/b", "s3://a", "gs://a", "hf://a", "ais://a", "sftp://a", "htgs://a"])
@pytest.mark.parametrize("allow_pipe", [False, True])
def test_other_urls_are_refused(url: str, allow_pipe: bool) -> None:
    with pytest.raises(ValueError, match="shards are not read from"):
        module(url, allow_pipe=allow_pipe)


@pytest.mark.parametrize("place", [5, None, b"/data", ["/data"]])
def test_what_is_no_path_is_refused(place: Any) -> None:
    with pytest.raises(TypeError, match="must be the path of a directory"):
        module(place)


def test_a_pipe_that_was_asked_for_is_read(tmp_path: Path) -> None:
    write_tars(SAMPLES, tmp_path, n_shards=2)
    command = f"pipe:cat {tmp_path}/wdshards-{{000000..000001}}.tar"
    assert read(module(command, allow_pipe=True)) == [[0], [1], [2], [3]]


def test_urls_cannot_come_in_by_the_options(tmp_path: Path) -> None:
    write_tars(SAMPLES, tmp_path, n_shards=1)
    with pytest.raises(ValueError, match=r"kwargs_wds\[Split.train\] cannot hold 'urls'"):
        read(module(tmp_path, kwargs_wds={Split.train: {"urls": "pipe:touch ran"}}))


def test_names_that_look_like_urls_are_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pipe:touch ran;#", "http:"):
        [path] = write_tars(SAMPLES, tmp_path / name, n_shards=1)
        path.rename(path.with_name("pipe:touch ran; ?#-000000.tar"))
        place = f"./{name}"
        assert read(module(place, prefix_tars_wds="pipe:touch ran; ?#")) == [[0], [1], [2], [3]]
    monkeypatch.chdir(tmp_path / "http:")
    assert len(read(module(".", prefix_tars_wds="pipe:touch ran; ?#"))) == 4
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("rewrite", ["/=pipe:touch ran /", "file:=pipe:touch ran #"])
def test_the_environment_cannot_rewrite_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrite: str) -> None:
    write_tars(SAMPLES, tmp_path / "data", n_shards=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOPEN_REWRITE", rewrite)
    monkeypatch.setenv("WDS_REWRITE", rewrite)
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    options = {Split.train: {"cache_dir": str(tmp_path / "cache"), "cache_size": 10**9}}
    assert len(read(module("data", kwargs_wds=options))) == 4
    assert len(read(module(tmp_path / "data"))) == 4
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("options", [{"resampled": True}, {"mode": "resampled"}])
def test_resampled_shards_are_opened_as_plain_files(tmp_path: Path, options: dict[str, Any]) -> None:
    write_tars(SAMPLES, tmp_path / "pipe:touch ran #", n_shards=2)
    made = module(f"{tmp_path}/pipe:touch ran #", kwargs_wds={Split.train: options})
    assert len(read(made)) == 4


def test_this_webdataset_would_run_the_shell(tmp_path: Path) -> None:
    """The tests above would pass in vain if webdataset had stopped doing so."""
    tar = write_tars(SAMPLES, tmp_path, n_shards=1)[0]
    with wds.gopen(f"pipe:touch {tmp_path}/ran; cat {tar}") as stream:
        stream.read()
    assert (tmp_path / "ran").exists()


def test_file_urls_and_home_directories_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(path) for path in write_tars(SAMPLES, tmp_path / "a b", n_shards=2)]
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ((tmp_path / "a b").as_uri(), "~/a b", tmp_path / "a b"):
        text = check_place("d", place, allow_pipe=False)
        assert shard_urls(text, "wdshards") == paths
    assert local_directory("~/x") == tmp_path / "x"


def test_schemes() -> None:
    places = ["/a", "a:b/c", "C:\\data", "./pipe:x", "pipe:x", "File:/x"]
    assert [scheme_of(place) for place in places] == ["", "", "", "", "pipe", "file"]


def test_no_shards(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no shard named wdshards-\*.tar.*prefix_tars_wds"):
        shard_urls(str(tmp_path), "wdshards")
    for prefix in ("a-b", "shard"):
        (tmp_path / f"{prefix}-000000.tar").touch()
        with pytest.raises(FileNotFoundError, match=rf"named wdshards-\*\.tar.*prefix.*'{prefix}'") as caught:
            shard_urls(str(tmp_path), "wdshards")
        (tmp_path / f"{prefix}-000000.tar").unlink()
        assert f"prefix_tars_wds={prefix!r}" in str(caught.value)
    for number in range(7):
        (tmp_path / f"p{number}-000000.tar").touch()
    with pytest.raises(FileNotFoundError, match=r"'p0', 'p1', 'p2', 'p3', 'p4' and 2 more: say which with prefix_tars"):
        shard_urls(str(tmp_path), "wdshards")
    with pytest.raises(FileNotFoundError, match=r"nowhere is no directory.*dirs_tars_wds"):
        shard_urls(str(tmp_path / "nowhere"), "wdshards")
