"""How a train loader and the trainer that it serves agree on epochs and steps; no Lightning is imported in here."""
