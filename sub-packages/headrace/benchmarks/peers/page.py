"""The tables and plots of docs/peers.md, from docs/figures/peers_*.json and nothing else.

python page.py                # writes both; needs matplotlib
python page.py --tables       # the tables only; needs nothing
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ("batching", "reading", "mixing", "resume", "steps")
Row = dict[str, Any]
PICTURES = {
    "batching": "Real tokens of the budget",
    "reading": "Random batches",
    "mixing": "Worst share in a window",
    "resume": "Time to the first batch",
    "steps": "Waiting in lockstep",
}
MISSING = "Not measured yet: `./scripts/peers` does.\n"
MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def measured(figures: Path) -> list[str]:
    """Return the parts that there are files of."""
    return [part for part in PARTS if (figures / f"peers_{part}.json").exists()]


def load(figures: Path, part: str) -> dict[str, Any]:
    """Return the content of one file."""
    found: dict[str, Any] = json.loads((figures / f"peers_{part}.json").read_text())
    return found


def number(value: float | None, digits: int = 3) -> str:
    """A figure with so many significant digits, without an exponent."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    text = f"{float(f'{value:.{digits}g}'):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(value: float) -> str:
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if value else "0"


def marked(texts: Sequence[str], values: Sequence[float | None], lowest: bool, ours: Sequence[bool]) -> list[str]:
    """Set peers in bold that are better than the best of ours."""
    own = [value for value, is_ours in zip(values, ours, strict=True) if is_ours and value is not None]
    best = (min if lowest else max)(own)

    def better(value: float | None) -> bool:
        return value is not None and (value < best if lowest else value > best)

    return [
        f"**{text}**" if not is_ours and better(value) and text != own_text(texts, ours, values, best) else text
        for text, value, is_ours in zip(texts, values, ours, strict=True)
    ]


def own_text(texts: Sequence[str], ours: Sequence[bool], values: Sequence[float | None], best: float) -> str:
    """What our best value reads as: a difference that the table does not show is none."""
    return next(text for text, value, own in zip(texts, values, ours, strict=True) if own and value == best)


def table(head: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of columns."""
    lines = [head, ["---"] * len(head), *map(list, zip(*columns, strict=True))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def kept_table(found: dict[str, Any]) -> str:
    """What each method keeps of what a training relies on: its worst case over all sets of samples."""
    methods = {row["name"]: list[Row]() for rows in found["rows"].values() for row in rows}
    for rows in found["rows"].values():
        for row in rows:
            methods[row["name"]].append(row)
    methods = dict(sorted(methods.items(), key=lambda method: not method[0].startswith("headrace")))  # ours first
    worst = {
        name: {key: max(row[key] for row in rows) for key in ("lost", "repeated", "violations", "largest")}
        | {"steps": [max(steps) for steps in zip(*(row["steps_differ_by"] for row in rows), strict=True)]}
        for name, rows in methods.items()
    }
    columns = {
        "": list(worst),
        "samples lost, repeated": [f"{row['lost']}, {row['repeated']}" for row in worst.values()],
        "batches over the budget": [percent(row["violations"]) for row in worst.values()],
        "largest batch": [number(row["largest"]) for row in worst.values()],
        "ranks' steps differ by": ["{}, {}".format(*row["steps"]) for row in worst.values()],
    }
    return table(list(columns), list(columns.values()))


def batching_table(found: dict[str, Any], corpus: str, cost: str) -> str:
    """What the batches of an epoch are worth."""
    rows = [row for row in found["rows"][corpus] if row["cost"] == cost]
    ours = [row["name"].startswith("headrace") for row in rows]
    # What breaks the budget wins nothing by fuller batches.
    lawful = [None if row["violations"] else row["fill"] for row in rows]
    columns = {
        "": [row["name"] for row in rows],
        "real tokens of the budget": marked([percent(row["fill"]) for row in rows], lawful, False, ours),
        "padding": marked([percent(r["padding"]) for r in rows], [r["padding"] for r in rows], True, ours),
        "batches over budget": [percent(row["violations"]) for row in rows],
        "imbalance, 8 ranks": marked(*pair(rows, "imbalance_8", 4), True, ours),
        "64 ranks": marked(*pair(rows, "imbalance_64", 4), True, ours),
    }
    if cost == "sum":
        columns.pop("padding")
    return table(list(columns), list(columns.values()))


def planning_table(found: dict[str, Any], cost: str) -> str:
    """What each method can do, and its times on all sets."""
    sets = {corpus: [row for row in rows if row["cost"] == cost] for corpus, rows in found["rows"].items()}
    [rows, *_] = sets.values()
    ours = [row["name"].startswith("headrace") for row in rows]
    resumed = {True: "yes", False: "no", None: "no state"}
    columns = {
        "": [row["name"] for row in rows],
        "supports ranks": ["yes" if row["knows_ranks"] else "no" for row in rows],
        "resumes exactly": [resumed[row["exact_resume"]] for row in rows],
    }
    for key, head in (("planning", "an epoch"), ("first_batch", "first batch")):
        columns |= {f"{head}, {corpus}": marked(*pair(rows, key), True, ours) for corpus, rows in sets.items()}
    return table(list(columns), list(columns.values()))


def pair(rows: Sequence[Row], key: str, digits: int = 3) -> tuple[list[str], list[float | None]]:
    """Texts and values of a column."""
    values = [row.get(key) for row in rows]
    return [number(value, digits) for value in values], values


def per_core(rows: list[dict[str, Any]], place: int) -> list[str]:
    """Megabytes a second of processor time, of rows in a row or at random."""
    found = [row.get("mb_per_core_second", [None, None])[place] for row in rows]
    return ["no" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in found]


def reading_table(found: dict[str, Any], corpus: str) -> str:
    rows = found["rows"][corpus]
    ours = [row["name"].startswith("headrace") for row in rows]
    columns = {
        "": [row["name"] for row in rows],
        "sequential": marked(*pair(rows, "sequential", 2), True, ours),
        "random": [text or "no" for text in marked(*pair(rows, "random", 2), True, ours)],
        "two workers": marked(*pair(rows, "two_workers", 2), True, ours),
        "MB/s a core, sequential": per_core(rows, 0),
        "MB/s a core, random": per_core(rows, 1),
        "open and first sample": marked(*pair(rows, "open", 2), True, ours),
        "memory, MiB": marked(*pair(rows, "pss_mib", 2), True, ours),
        "anonymous memory, MiB": marked(*pair(rows, "anonymous_mib", 2), True, ours),
        "bytes on disk": marked(*pair(rows, "disk", 3), True, ours),
    }
    return table(list(columns), list(columns.values()))


def mixing_table(found: dict[str, Any]) -> str:
    rows = found["rows"]
    ours = [row["name"].startswith("headrace") for row in rows]
    window, ranks = found["window"], found["ranks"]
    columns = {"": [row["name"] for row in rows]}
    for key, head in (
        ("global_window", f"{window * ranks:,} samples of all ranks"),
        ("rank_window", f"{window} samples of a rank"),
        ("whole", f"{found['draws_of_a_rank'] * ranks:,} samples of all ranks"),
        ("rank_whole", f"{found['draws_of_a_rank']:,} samples of a rank"),
    ):
        columns[head] = marked(*pair(rows, key, 2), True, ours)
    return table(list(columns), list(columns.values()))


def token_mixing_table(found: dict[str, Any]) -> str:
    rows = found["token_rows"]
    ours = [row["name"].startswith("headrace") for row in rows]
    columns = {
        "": [row["name"] for row in rows],
        "any prefix, in longest samples": marked(*pair(rows, "token_prefix", 2), True, ours),
        f"any {found['window'] * found['ranks']:,} samples": marked(*pair(rows, "token_window", 2), True, ours),
    }
    return table(list(columns), list(columns.values()))


def counts(row: Row | None) -> str:
    """Lost and repeated samples, or why there are none."""
    if row is None:
        return ""
    if "refused" in row:
        return "refused"
    return f"{row['lost']:,}, {row['repeated']:,}"


def resume_table(found: dict[str, Any]) -> str:
    rows = found["rows"]
    ours = [row["name"].startswith("headrace") for row in rows]
    columns = {
        "": [row["name"] for row in rows],
        "has a state": ["yes" if row.get("stateful") else "no" for row in rows],
        "lost, repeated": [counts(None if "error" in row else row) for row in rows],
        "with one worker instead of two": [counts(row.get("other_workers")) for row in rows],
        "on one rank instead of two": [counts(row.get("other_ranks")) for row in rows],
        "first batch, times that of a fresh epoch": marked(*pair(rows, "first_batch"), True, ours),
    }
    return table(list(columns), list(columns.values()))


def steps_table(found: dict[str, Any], figure: str) -> str:
    """One figure of the micro-batches of an optimizer step: a row a function, a column a kind of lengths."""
    cases = found["rows"]
    columns = {"": [*(row["name"] for row in next(iter(cases.values()))), "no plan is below"]}
    for case, rows in cases.items():
        ours = [row["name"].startswith("headrace") for row in rows]
        values = [None if row["broken"] else row[figure] for row in rows]
        texts = [percent(row[figure] - 1) for row in rows] if figure == "micro_batches" else pair(rows, figure, 4)[0]
        # What breaks the cap is not compared.
        shown = ["breaks the cap" if row["broken"] else text for row, text in zip(rows, texts, strict=True)]
        columns[case] = [*marked(shown, values, True, ours), number(found["bounds"][case].get(figure), 4)]
    if figure == "lockstep":
        rows = cases["rollouts"]
        ours = [row["name"].startswith("headrace") for row in rows]
        columns["time, rollouts"] = [*marked(*pair(rows, "time", 2), True, ours), ""]
    return table(list(columns), list(columns.values()))


def contexts_table(cases: dict[str, list[Row]]) -> str:
    """What a step with samples on several ranks is worth."""
    columns = {"": [row["name"] for row in next(iter(cases.values()))]}
    for case, rows in cases.items():
        ours = [row["name"].startswith("headrace") for row in rows]
        columns[f"{case}: lockstep"] = marked(*pair(rows, "lockstep", 4), True, ours)
        for key in ("barriers", "passes", "time"):
            columns[f"{key}, {case}"] = marked(*pair(rows, key, 2), True, ours)
    return table([head.split(",")[0] for head in columns], list(columns.values()))


def versions_table(figures: Path) -> str:
    """Every version that took part in any of the files."""
    names: dict[str, str] = {}
    for part in measured(figures):
        names |= load(figures, part)["versions"]
    return table(["distribution", "version"], [list(names), list(names.values())])


def tables(figures: Path, parts: Sequence[str] | None = None) -> dict[str, str]:
    """Return every table that was measured, and its picture, by the name that its markers have."""
    made = {"versions": versions_table(figures)}
    for part in measured(figures) if parts is None else parts:
        found = load(figures, part)
        made[f"picture {part}"] = f"![{PICTURES[part]}](figures/peers_{part}.png)\n"
        if part == "batching":
            made |= {
                f"batching {corpus} {cost}": batching_table(found, corpus, cost)
                for corpus in found["rows"]
                for cost in ("sum", "padded")
            }
            made |= {f"planning {cost}": planning_table(found, cost) for cost in ("sum", "padded")}
            made["kept"] = kept_table(found)
        elif part == "reading":
            made |= {f"reading {corpus}": reading_table(found, corpus) for corpus in found["rows"]}
        elif part == "steps":
            made |= {f"steps {name}": steps_table(found, name) for name in ("lockstep", "totals", "micro_batches")}
            made["contexts"] = contexts_table(found["contexts"])
        elif part == "mixing":
            made |= {"mixing": mixing_table(found), "mixing tokens": token_mixing_table(found)}
        else:
            made[part] = resume_table(found)
    return made


def filled(text: str, made: dict[str, str]) -> str:
    """Return a page with what lies between its markers replaced."""
    return MARKED.sub(lambda match: match[1] + "\n" + made.get(match[2], MISSING) + "\n" + match[3], text)


def folded(name: str) -> str:
    """A long name on two lines."""
    return name.replace(" ", "\n", 1) if len(name) > 26 else name


def bars(figures: Path, part: str, rows: Sequence[Row], key: str, title: str) -> None:
    """Draw one figure of each row, ours in another colour."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.get(key) is not None]
    names = [folded(row["name"]) for row in shown][::-1]
    values = [row[key] for row in shown][::-1]
    colours = ["#0b7285" if name.startswith("headrace") else "#adb5bd" for name in names]
    figure, axes = pyplot.subplots(figsize=(5, 0.6 + 0.34 * len(names)), layout="constrained")  # for a telephone, too
    axes.barh(names, values, color=colours)
    if max(values) > 30 * min((value for value in values if value > 0), default=1):
        axes.set_xscale("log")
    for place, value in enumerate(values):
        axes.text(value, place, f" {number(value)}", va="center", fontsize=9)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(figures / f"peers_{part}.png", dpi=140, metadata={"Software": None})
    pyplot.close(figure)


def plots(figures: Path) -> None:
    """Draw the picture of each part."""
    for part in measured(figures):
        found = load(figures, part)
        rows = found["rows"]
        if part == "batching":
            key, title = "fill", "real tokens, % of the budget, lognormal sizes"
            rows = [{**row, key: 100 * row[key]} for row in rows["lognormal"] if not row["violations"]]
        elif part == "reading":
            key, title = "random", "random batches of 64 texts, time over headrace's, library"
            rows = rows["library"]
        elif part == "mixing":
            window = found["window"] * found["ranks"]
            key, title = "global_window", f"worst share in {window:,} samples, percentage points off"
        elif part == "steps":
            key, title = "lockstep", "work that ranks wait for at micro-batches, % of the mean, rollouts"
            rows = [{**row, key: 100 * (row[key] - 1)} for row in rows["rollouts"] if not row["broken"]]
        else:
            key, title = "first_batch", "first batch of a resume, time over a fresh epoch's"
        bars(figures, part, rows, key, title)


def write(docs: Path, pictures: bool = True) -> None:
    """Bring the page up to its figures."""
    page = docs / "peers.md"
    if page.exists():
        page.write_text(filled(page.read_text(), tables(docs / "figures")))
    if pictures:
        plots(docs / "figures")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[4] / "docs", "--tables" not in sys.argv)
