"""The parts of collating: walking through samples, padding and packing. Pure."""
