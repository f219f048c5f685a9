"""The names of the splits, and arguments that are given per split."""

import reprlib
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

T = TypeVar("T")


class Split(Enum):
    """Names of the splits of the data."""

    train = "train"
    val = "val"
    test = "test"
    predict = "predict"


class ByName(TypedDict, Generic[T], total=False):
    """A value for each split, as a config has it: LightningCLI looks at the keys, and so tells it from a class."""

    train: T
    val: T
    test: T
    predict: T


BySplit: TypeAlias = Mapping[Split, T] | Mapping[str, T] | Mapping[Split | str, T]
ForSplits: TypeAlias = ByName[T] | T | BySplit[T]  # one value for all splits, or one for each
_NEEDED = {"fit": Split.train, "validate": Split.val, "test": Split.test, "predict": Split.predict}
# Other words for each split.
_WORDS = {
    "train": ("training", "fit"),
    "val": ("valid", "validation", "validate", "dev", "eval", "evaluation"),
    "test": ("testing",),
    "predict": ("prediction",),
}
_MEANT = {word: name for name, words in _WORDS.items() for word in (name, *words)}
NESTED = "shards are {'train': directory}, or {'train': {'name': directory, ...}} for several sources"
_CLOSE = 0.81  # "tain" and "vall" are as close to a split, and "text" and "brain" are not


def stage_name(stage: Any) -> str:
    """The name of a stage, given as text or as a trainer's own Enum."""
    name = str(getattr(stage, "value", stage))
    if name not in _NEEDED:
        raise ValueError(f"stage must be one of {', '.join(map(repr, _NEEDED))}, got {name!r}")
    return name


def needed_by(stage: str, given: Container[Split]) -> Split:
    """The split that a stage cannot do without; predict takes `Split.test` where there is no `Split.predict`."""
    instead = stage == "predict" and Split.test in given and Split.predict not in given
    return Split.test if instead else _NEEDED[stage]


def need(split: Split, what: str, name: str, given: Collection[Split]) -> None:
    """Refuse that an argument, by its name, lacks a split that something needs."""
    if split not in given:
        have = _names(given) or "no split"
        instead = f" or {Split.test.name!r}" if split is Split.predict else ""
        raise ValueError(f"{what} needs {split.name!r}{instead}, but {name} has {have}: add {name}[{split.name!r}]")


def _names(splits: Iterable[Split]) -> str:
    return ", ".join(repr(split.name) for split in splits)


def as_split(key: Any) -> Split | None:
    """The split of that name, or None."""
    if isinstance(key, Split):
        return key
    return Split.__members__.get(key) if isinstance(key, str) else None


def named_split(key: Any) -> str | None:
    """The name of the split that a key says, in whichever word.

    >>> named_split("validation"), named_split("Train"), named_split("books")
    ('val', 'train', None)
    """
    return _MEANT.get(key.lower()) if isinstance(key, str) else None


def meant_split(key: Any) -> str | None:
    """The name of the split that a key says, or that it nearly says.

    >>> meant_split("validation"), meant_split("tain"), meant_split("tset"), meant_split("text")
    ('val', 'train', 'test', None)
    """
    if not isinstance(key, str):
        return None
    word = key.lower()
    near = [word, *(one for one in _WORDS if sorted(one) == sorted(word)), *get_close_matches(word, _MEANT, 1, _CLOSE)]
    return next((_MEANT[one] for one in near if one in _MEANT), None)


def by_split(name: str, given: Mapping[Any, T] | None, example: str = "...", cure: str = "") -> dict[Split, T]:
    """Copy an argument that is a mapping from splits or their names.

    For errors, `example` is that of a value, and `cure` says what else the mapping may have been meant for.

    >>> by_split("n_samples", {"train": 10})
    {<Split.train: 'train'>: 10}
    >>> by_split("n_samples", {"train set": 10})
    Traceback (most recent call last):
    TypeError: n_samples: keys must be 'train', 'val', 'test', 'predict' or members of Split, got 'train set'
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a mapping from Split, got {reprlib.repr(given)}: give {{'train': {example}}}")
    found: dict[Split, T] = {}
    for key, value in given.items():
        split = as_split(key)
        if split is None:
            meant = meant_split(key)
            hint = f": it is {meant!r} here" if meant else f"; {cure}" if cure else ""
            raise TypeError(f"{name}: keys must be {_names(Split)} or members of Split, got {key!r}{hint}")
        if split in found:
            raise ValueError(f"{name} has {split.name!r} twice: as a member of Split and by its name")
        found[split] = value
    return found


@dataclass(frozen=True)
class PerSplit:
    """The value of an argument: one for all splits, or a mapping from splits, which may leave some to the default.

    Every mapping is one from splits, unless `mappings` are among the values: then it is one if all its keys are splits,
    or are meant to be. `cure` says in errors what else a mapping may have been meant for.
    """

    name: str
    given: Any
    default: Any = None
    mappings: bool = False
    cure: str = ""

    def __post_init__(self) -> None:
        if self.mapped:
            object.__setattr__(self, "given", by_split(self.name, self.given, cure=self.cure))

    @property
    def mapped(self) -> bool:
        """Whether it is a mapping from splits."""
        if not isinstance(self.given, Mapping):
            return False
        if not self.mappings or any(isinstance(key, Split) for key in self.given):
            return True
        return bool(self.given) and all(meant_split(key) for key in self.given)

    def __contains__(self, split: Split) -> bool:
        return split in self.given if self.mapped else self.given is not None

    def __getitem__(self, split: Split) -> Any:
        return self.given.get(split, self.default) if self.mapped else self.given


def named_sources(name: str, given: Any, default: str) -> dict[str, Any]:
    """The sources of a split, each with a name; an only one gets the default's, which more may join later."""
    if not isinstance(given, Mapping):
        return {default: given}
    if not given:
        raise ValueError(f"{name} is empty: name at least one source, such as {{'proteins': directory}}")
    for key, place in given.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"{name}: names of sources must be text, got {key!r}; {NESTED}")
        if named_split(key) and (key != default or len(given) == 1):
            raise TypeError(
                f"{name} names sources, and {key!r} is the name of a split: give the source another name, or the split "
                "a place of its own"
            )
        if isinstance(place, Split | Mapping):
            raise TypeError(f"{name}: {key!r} must be a place of shards, got {place!r}; {NESTED}")
    return dict(given)
