"""Measure headrace and its peers on this machine: ``./scripts/peers``, or ``./scripts/peers --quick``.

    python benchmarks/peers --only batching reading    # parts: batching reading mixing resume steps
    python benchmarks/peers --page                     # nothing but the page and its plots, from the JSON that is there

Every library whose distribution is installed is measured as its documentation uses it; ``requirements-peers.txt`` and
``requirements-wheels.txt`` name the versions. Each part writes ``docs/figures/peers_PART.json``; tables and plots of
``docs/peers.md`` come from these files alone. With ``--quick`` they are written to ``--out`` only, for a look.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import page
from measure import environment, quiet, save, without_vision

DOCS = Path(__file__).resolve().parents[4] / "docs"
BUDGET = 16_384
PARTS = ("batching", "reading", "mixing", "resume", "steps")


def sizes_and_counts(small: bool) -> dict[str, int]:
    """How much is measured."""
    return {
        "lognormal": 5_000 if small else 30_000,
        "library": 3_000 if small else 20_000,
        "long": 1_000 if small else 10_000,
        "draws": 2_048 if small else 8_192,
        "resumed": 2_000 if small else 20_000,
        "runs": 1 if small else 3,
        "seeds": 1 if small else 5,
    }


def batching(much: dict[str, int], folder: Path) -> dict[str, Any]:
    import batching as part
    from corpus import lognormal_sizes, sizes_of, standard_library

    corpora = {
        "library": sizes_of(standard_library(much["library"])),
        "lognormal": lognormal_sizes(much["lognormal"]),
    }
    return {
        "budget": BUDGET,
        "samples": {name: len(sizes) for name, sizes in corpora.items()},
        "rows": {name: part.measure(sizes, BUDGET, much["runs"]) for name, sizes in corpora.items()},
    }


def reading(much: dict[str, int], folder: Path) -> dict[str, Any]:
    import reading as part
    from corpus import lognormal_sizes, noise, standard_library

    corpora = {
        "library": standard_library(much["library"]),
        "lognormal": noise(lognormal_sizes(much["long"]), times=16),
    }
    return {
        "samples": {name: len(texts) for name, texts in corpora.items()},
        "bytes": {name: sum(map(len, texts)) for name, texts in corpora.items()},
        "rows": {name: part.measure(texts, folder / name, much["runs"]) for name, texts in corpora.items()},
    }


def mixing(much: dict[str, int], folder: Path) -> dict[str, Any]:
    import mixing as part

    return {
        "weights": part.WEIGHTS,
        "ranks": part.RANKS,
        "window": part.WINDOW,
        "draws_of_a_rank": much["draws"],
        "rows": part.measure(folder, much["draws"]),
        "token_rows": part.measure_tokens(folder / "tokens", much["draws"]),
    }


def resume(much: dict[str, int], folder: Path) -> dict[str, Any]:
    import resume as part

    return {"samples": much["resumed"], "rows": part.measure(folder, much["resumed"], much["runs"])}


def steps(much: dict[str, int], folder: Path) -> dict[str, Any]:
    import steps as part

    return {
        "samples": part.SAMPLES,
        "ranks": part.RANKS,
        "seeds": much["seeds"],
        "cases": {name: {"cap": case.cap or "longest", "linear": case.linear} for name, case in part.CASES.items()},
        "contracts": part.contracts(much["seeds"]),
        "contexts": part.measure_contexts(much["seeds"]),
        **part.measure(much["seeds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sets, a few minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, help="folder of the JSON files; docs/figures unless --quick")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    quiet()
    without_vision()
    warnings.simplefilter("ignore")  # of the libraries
    out = options.out or (Path(tempfile.mkdtemp(prefix="peers-")) if options.quick else DOCS / "figures")
    makers = {"batching": batching, "reading": reading, "mixing": mixing, "resume": resume, "steps": steps}
    much = sizes_and_counts(options.quick)
    for name in () if options.page else options.only:
        begin = time.perf_counter()
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = makers[name](much, Path(folder))
        minutes = (time.perf_counter() - begin) / 60
        save(out, name, {**environment(options.quick), "minutes": minutes, **found})
        print(f"{name}: {minutes:.1f} minutes, written to {out}", flush=True)
    if options.quick:
        print("\n".join(table for one in PARTS if (out / f"peers_{one}.json").exists()
                        for table in page.tables(out, [one]).values()))  # fmt: skip
    else:
        page.write(DOCS)


if __name__ == "__main__":
    main()
