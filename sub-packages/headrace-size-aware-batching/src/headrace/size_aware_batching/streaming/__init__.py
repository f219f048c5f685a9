"""The parts of batching a stream: budget, rounds, buffer and gate."""
