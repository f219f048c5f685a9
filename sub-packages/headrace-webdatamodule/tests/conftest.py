"""Settings for the tests of this package."""

from hypothesis import settings

# On a busy machine the default deadline fails tests that are right.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
