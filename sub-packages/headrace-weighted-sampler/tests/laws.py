"""What several laws need: how many examples of a slow one are tried, and orders step by step."""

from collections.abc import Iterable

from hypothesis import settings


def examples(count: int) -> settings:
    """Return settings for so many examples, or fewer with --fast; the nightly run tries as many as of other laws."""
    usual = settings().max_examples
    nightly = settings.default is settings.get_profile("nightly")
    return settings(max_examples=max(count, usual) if nightly else min(count, usual))


def in_steps(samples: Iterable[int], world: int) -> list[list[int]]:
    """Cut an order into steps of so many ranks, each sorted: ranks take turns within a step."""
    order = list(samples)
    return [sorted(order[low : low + world]) for low in range(0, len(order), world)]
