"""The classes and functions that a user trusts a pickle with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, TypeAlias

from headrace.webdatamodule.shards.errors import UnsafePickleError


class AllowedClassError(ValueError):
    """An entry of allowed_classes is no class, function or name."""


AllowedClass: TypeAlias = type | Callable[..., Any] | str


class Allowed:
    """Finds allowed names and remembers what they stood for.

    Args:
        classes: Classes or functions, or their names as "module.QualifiedName".

    Raises:
        ValueError: When an entry is neither.

    >>> import fractions
    >>> Allowed(["fractions.Fraction"]).find("fractions", "Fraction") is fractions.Fraction
    True
    """

    def __init__(self, classes: Collection[AllowedClass]) -> None:
        if isinstance(classes, str):
            raise AllowedClassError(f"allowed_classes must be a list of classes or names, got the text {classes!r}")
        self._known: dict[str, Any] = dict(_entry(cls) for cls in classes)
        self._given: dict[int, Any] = {id(cls): cls for cls in self._known.values() if cls is not None}

    def find(self, module: str, name: str) -> Any:
        """The allowed object of that name; an UnsafePickleError when there is none."""
        full = f"{module}.{name}"
        if full not in self._known:
            raise UnsafePickleError(
                f"the pickle asks for {full}, which is not on the list of safe names. If you trust whoever "
                f"wrote it, pass allowed_classes=[{full!r}]"
            )
        if self._known[full] is None:
            self._known[full] = attrgetter(name)(importlib.import_module(module))
            self._given[id(self._known[full])] = self._known[full]
        return self._known[full]

    def holds(self, value: Any) -> bool:
        """Whether the value is one of the allowed objects itself."""
        return id(value) in self._given


def _entry(cls: AllowedClass) -> tuple[str, Any]:
    if isinstance(cls, str):
        if not all(part.isidentifier() for part in cls.split(".")) or "." not in cls:
            raise AllowedClassError(f"allowed_classes has {cls!r}; write a name as 'module.QualifiedName'")
        return cls, None
    names = getattr(cls, "__module__", None), getattr(cls, "__qualname__", None)
    if not all(isinstance(name, str) for name in names):
        raise AllowedClassError(f"allowed_classes has {cls!r}; give a class, a function or 'module.QualifiedName'")
    return f"{names[0]}.{names[1]}", cls
