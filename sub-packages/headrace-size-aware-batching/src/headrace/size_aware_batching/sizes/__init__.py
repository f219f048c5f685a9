"""Sizes of samples, read from whatever holds them."""
