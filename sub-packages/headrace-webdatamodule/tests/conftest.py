"""Settings for the tests of this package."""

from hypothesis import settings

# On a busy machine the default deadline fails tests that are right.
settings.register_profile("headrace", deadline=None)
settings.register_profile("few", deadline=None, max_examples=10)  # where all of them ran before
settings.load_profile("headrace")
