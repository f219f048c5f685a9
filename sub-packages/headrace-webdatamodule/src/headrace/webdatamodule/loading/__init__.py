"""The parts of `ResumableLoader` and `IndexedWebDataModule`; nothing in here needs lightning or webdataset."""
