"""How batches are planned: pure functions over arrays and integers, nothing here knows of ranks or loaders."""
