"""For third-party training loops. Each module imports its library, so nothing is imported here."""
