"""For training loops of others. Each module imports its library, so nothing is imported here."""
