"""How objects show themselves: as text that never raises, and as tables and bars in a notebook."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import wraps
from html import escape
from itertools import islice
from typing import Any, TypeVar

Shown = TypeVar("Shown")

_BARS = 40  # at most in one picture
_NAME, _BAR, _ROW = 130, 240, 16  # pixels: of a bar's name, of the longest bar, of a row
_LETTERS = 20  # of a name that fits there
_PLAIN = bool | int | float | str | None
_PARTS, _LETTERS_OF_A_VALUE = 8, 60  # of values that are shown themselves


def never_raises(show: Callable[[Shown], str]) -> Callable[[Shown], str]:
    """Let a ``__repr__`` name the class alone where the object is half-made or closed.

    >>> class Half:
    ...     @never_raises
    ...     def __repr__(self):
    ...         return f"Half({self.missing})"
    >>> Half()
    <Half, not complete>
    """

    @wraps(show)
    def shown(self: Shown) -> str:
        try:
            return show(self)
        except Exception:
            return f"<{type(self).__name__}, not complete>"

    return shown


def described(value: object) -> str:
    """Name a value that a user gave: a short plain one as it is, a function by its name, others as `kind_of` does.

    >>> described(3.5), described({"labels": -100}), described(len), described(range(1000))
    ('3.5', "{'labels': -100}", 'len', 'range of 1,000')
    """
    parts: Sequence[object] = [value]
    if isinstance(value, dict):
        parts = [one for pair in islice(value.items(), _PARTS) for one in pair]
    elif isinstance(value, tuple | list):
        parts = value[:_PARTS]
    if all(isinstance(part, _PLAIN) for part in parts):
        text = repr(value)
        if len(text) <= _LETTERS_OF_A_VALUE:
            return text
    name = getattr(value, "__name__", None) if callable(value) else None
    return name if isinstance(name, str) else kind_of(value)


def kind_of(value: object) -> str:
    """Name the class of a value and its length, if it has one: its own ``repr`` may be as long as a dataset."""
    try:
        return f"{type(value).__name__} of {len(value):,}"  # type: ignore[arg-type]  # caught where it has no length
    except Exception:
        return type(value).__name__


def inner(value: object) -> str:
    """Name an object inside another one: by its ``repr`` where that is ours, else by its class; its length may cost."""
    own = (getattr(type(value).__repr__, "__module__", None) or "").startswith("headrace.")
    return repr(value) if own else kind_of(value) if isinstance(value, list | tuple) else type(value).__name__


def shape_of(value: Any) -> str:
    """Name the shape of an array or tensor, or of those in a tuple, list or dict.

    >>> shape_of({"ids": [None, 3]})
    '{ids: [None, int]}'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {shape_of(one)}' for name, one in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shape_of, value[:4]))}{', ...' if len(value) > 4 else ''}]"
    shape = getattr(value, "shape", None)
    if shape is None:
        return "None" if value is None else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {[*shape]}"


def options_of(made: Any) -> str:
    """Return the class of a dataclass and the fields that differ from their defaults.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Options:
    ...     size: int
    ...     shuffle: bool = True
    >>> options_of(Options(3))
    'Options(size=3)'
    """
    shown = []
    for field in fields(made):
        value = getattr(made, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.repr and (value is not default and (type(value) is not type(default) or value != default)):
            shown.append(f"{field.name}={described(value)}")
    return f"{type(made).__name__}({', '.join(shown)})"


def html(
    title: str, rows: Sequence[Sequence[str]], *, head: Sequence[str] = (), notes: Sequence[str] = (), picture: str = ""
) -> str:
    """Return a table for a notebook; all texts are escaped, but for the picture, which is HTML already.

    Args:
        title: Stands above.
        rows: Their cells; the first one is a name, the others are figures.
        head: Cells of the heading, if there is one.
        notes: Lines below.
        picture: Of `bars`.
    """
    lines = [f"<p><strong>{escape(title)}</strong></p>", "<table>"]
    if head:
        lines.append(f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>")
    lines.append("<tbody>")
    for name, *cells in rows:
        figures = "".join(f'<td style="text-align: right">{escape(cell)}</td>' for cell in cells)
        lines.append(f'<tr><td style="text-align: left; white-space: pre">{escape(name)}</td>{figures}</tr>')
    lines += ["</tbody>", "</table>", *(f"<p>{escape(note)}</p>" for note in notes)]
    return "\n".join(["<div>", *lines, *([picture] if picture else []), "</div>"])


def bars(title: str, parts: Mapping[str, Sequence[float]]) -> str:
    """Return horizontal bars as inline SVG, each of its parts in a row; nothing where there is nothing to see."""
    shown = {name: [max(0.0, float(part)) for part in row] for name, row in [*parts.items()][:_BARS]}
    most = max((math.fsum(row) for row in shown.values()), default=0.0)
    if not 0 < most < math.inf:
        return ""
    lines = []
    for number, (name, row) in enumerate(shown.items()):
        top, left = number * _ROW, float(_NAME)
        short = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
        lines.append(f'<text x="0" y="{top + 12}">{escape(short)}</text>')
        for place, part in enumerate(row):
            width = _BAR * part / most
            lines.append(
                f'<rect x="{left:.2f}" y="{top + 2}" width="{width:.2f}" height="{_ROW - 4}" '
                f'fill-opacity="{0.4 if place % 2 else 0.7}"><title>{escape(name)}: {part:.6g}</title></rect>'
            )
            left += width
    return "\n".join(
        [
            f"<p>{escape(title)}</p>",
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_NAME + _BAR}" height="{len(shown) * _ROW}" '
            'font-size="11" font-family="sans-serif" fill="currentColor" role="img">',
            f"<title>{escape(title)}</title>",
            *lines,
            "</svg>",
        ]
    )
