"""What `IndexedWebDataModule` is made of; no Lightning in here."""
