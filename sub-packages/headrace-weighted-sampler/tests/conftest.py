"""How hypothesis runs here."""

from hypothesis import settings

# A shared or busy machine makes single examples slow; that is no fault of the code.
settings.register_profile("headrace", deadline=None)
settings.register_profile("few", deadline=None, max_examples=10)  # where all of them ran before
settings.load_profile("headrace")
