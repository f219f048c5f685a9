"""When a mixture of streams ends.

Nothing is read ahead, so that a source has run out shows at its next turn. Hugging Face's
``interleave_datasets`` looks one item ahead and ends right after the last item of a source; what the other
sources hand out until the turn comes round is left out there and delivered here. Megatron Energon's blend
drops a source that has run out and goes on with the others, at shares that are then no longer the weights.
"""

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

Stopping: TypeAlias = Literal["first_exhausted", "all_exhausted", "endless"]


def first_exhausted(ends: Iterable[int]) -> bool:
    """Stop at the first turn of a source that has no more.

    Args:
        ends: How often each source has run out.

    >>> first_exhausted([0, 0]), first_exhausted([1, 0])
    (False, True)
    """
    return any(ends)


def all_exhausted(ends: Iterable[int]) -> bool:
    """Stop when each source has run out at least once; until then those that have begin again.

    Args:
        ends: How often each source has run out.

    >>> all_exhausted([2, 0]), all_exhausted([2, 1])
    (False, True)
    """
    return all(ends)


def endless(_ends: Iterable[int]) -> bool:
    """Never stop; a source that has run out begins again.

    >>> endless([3, 1])
    False
    """
    return False


RULES: dict[Stopping, Callable[[Iterable[int]], bool]] = {
    "first_exhausted": first_exhausted,
    "all_exhausted": all_exhausted,
    "endless": endless,
}


def check_stopping(stopping: object) -> Stopping:
    """Return ``stopping`` if it is the name of a rule.

    Raises:
        ValueError: If it is not.

    >>> check_stopping("endless")
    'endless'
    """
    for name in RULES:
        if stopping == name:
            return name
    raise ValueError(f"stopping must be one of {', '.join(map(repr, RULES))}, got {stopping!r}")
