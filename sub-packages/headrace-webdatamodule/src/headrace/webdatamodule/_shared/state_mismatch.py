"""How a state that is of other settings is refused: what differs is data, the sentence is made of it once."""

from collections.abc import Collection, Sequence


class StateMismatchError(ValueError):
    """A state of other settings.

    Args:
        reason: What differs, in a sentence without its end.
        cure: What to do, after a colon.
        differences: Names of the arguments, or entries of the state, that differ.
        acceptable: What ``accept=`` has to name to resume; empty if that is not possible.
    """

    def __init__(self, reason: str, cure: str, differences: Sequence[str], acceptable: Collection[str] = ()) -> None:
        super().__init__(f"{reason}: {cure}")
        self.reason, self.differences, self.acceptable = reason, tuple(differences), frozenset(acceptable)

    def __reduce__(self) -> tuple[type, tuple[str, str, tuple[str, ...], frozenset[str]]]:
        cure = str(self).removeprefix(f"{self.reason}: ")
        return type(self), (self.reason, cure, self.differences, self.acceptable)
