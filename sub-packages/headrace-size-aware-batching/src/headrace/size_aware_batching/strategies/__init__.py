"""One way to form batches per file."""
