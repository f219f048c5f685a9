"""The tar format and plain files."""
