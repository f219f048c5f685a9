"""How many examples of a slow law are tried."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Return settings for so many examples; the nightly run tries as many as of the other laws, if that is more."""
    nightly = settings.default is settings.get_profile("nightly")
    return settings(max_examples=max(count, 100) if nightly else count)
