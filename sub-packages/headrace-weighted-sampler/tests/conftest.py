"""How hypothesis runs here."""

import pytest
from hypothesis import settings

# No deadline: a shared or busy machine makes single examples slow; that is no fault of the code. And the same examples
# each time, so that a change is judged by what it changes. The nightly run draws new ones, and more.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("few", deadline=None, derandomize=True, max_examples=10)  # where all of them ran before
settings.register_profile("nightly", deadline=None)
settings.load_profile("headrace")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("nightly")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes would be names that nobody can type, and that differ from run to run where they hold a time."""
    if not isinstance(val, bytes) or (val.isascii() and len(val) <= 20):
        return None
    return f"{argname} of {len(val)} bytes"
