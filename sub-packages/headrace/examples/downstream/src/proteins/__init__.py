"""Trains on protein sequences of uneven length."""
