"""What decides the order of a stream, in words, so that a checkpoint of another one can be told apart."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from headrace.webdatamodule.recipe import Recipe
from headrace.webdatamodule.streaming.counting import description, plain
from headrace.webdatamodule.streaming.ranges import RangeSource
from headrace.webdatamodule.streaming.seeding import shuffles_unseeded
from headrace.webdatamodule.streaming.state import UNSEEDED
from headrace.webdatamodule.urls import scheme_of

_PIECE, _END = 4096, 12288  # bytes; a tar file may end with 10 KiB of zeros


def fingerprint(
    recipe: Recipe, urls: Mapping[str, Sequence[str]], sources: Mapping[str, RangeSource | None]
) -> dict[str, str]:
    """Texts that differ when the order does. Where the shards lie does not matter, and neither do functions.

    Args:
        recipe: What the pipeline is made of.
        urls: The shards of each source.
        sources: What reads the samples of each.

    Returns:
        Texts by name.
    """
    options = recipe.kwargs_wds
    shuffled = bool(options.get("shardshuffle"))
    parts = {
        "seed": str(recipe.seed) if shuffled else "none, the shards are not shuffled,",
        "suffix_keys_wds": ", ".join(recipe.keys),
        "n_samples": str(recipe.n_samples),
        "global_batch_size": str(recipe.global_batch_size),
        "pipeline_wds": description(recipe.stages_wds),
        "pipeline_prebatch_wld": description(recipe.stages_wld),
        "invoke_wds": plain(recipe.invoke_wds),
        "invoke_wld": plain(recipe.invoke_wld),
    }
    calls = [*recipe.invoke_wds, *recipe.invoke_wld]
    if shuffles_unseeded([*recipe.stages_wds, *recipe.stages_wld], calls):
        parts[UNSEEDED] = str(recipe.seed)
    if recipe.mix is not None:
        parts["mix"] = description([recipe.mix])
    for name, source in sources.items():
        of = f" of {name!r}" if name else ""
        local = scheme_of(recipe.places[name]) != "pipe"
        parts[f"the split{of}"] = "by shards (exact=False)" if source is None else "by samples (exact=True)"
        parts[f"the fingerprint of the shards{of}"] = (
            _of_files(urls[name], local=local) if source is None else source.fingerprint
        )
    return parts


def _of_files(urls: Sequence[str], *, local: bool) -> str:
    seen = blake2b(digest_size=16)
    for url in urls:
        seen.update(_of_file(url) if local else url.encode())
    return seen.hexdigest()


def _of_file(path: str) -> bytes:
    """Name, size and three pieces: all of it would have to be read for more, which an index makes needless."""
    with open(path, "rb") as file:  # noqa: PTH123 - the path is text already
        size = file.seek(0, 2)
        seen = blake2b(f"{Path(path).name}/{size}/".encode(), digest_size=16)
        for begin in (0, size // 2, max(0, size - _END)):
            file.seek(begin)
            seen.update(file.read(_PIECE))
    return seen.digest()
