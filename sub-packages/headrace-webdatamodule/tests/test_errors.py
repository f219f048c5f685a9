import pickle

import pytest

from headrace.webdatamodule import DecodeError, ShardError, UnsafePickleError


def every_kind(kind: type[ShardError]) -> set[type[ShardError]]:
    return {kind}.union(*map(every_kind, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(every_kind(ShardError), key=str))
@pytest.mark.parametrize("protocol", range(6))
def test_errors_keep_their_place_on_the_way_from_a_worker(kind: type[ShardError], protocol: int) -> None:
    error = kind("bad", shard="a.tar", sample="s1", member="s1.pyd", offset=512)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert vars(again) == vars(error)
    assert str(again) == "bad (shard 'a.tar', sample 's1', member 's1.pyd', offset 512)"


def test_unknown_places_are_left_out() -> None:
    assert str(ShardError("bad")) == "bad"
    assert str(ShardError("bad", offset=0)) == "bad (offset 0)"


def test_one_except_clause_catches_each() -> None:
    assert issubclass(UnsafePickleError, pickle.UnpicklingError)
    assert issubclass(UnsafePickleError, DecodeError)
    assert issubclass(DecodeError, ShardError)
