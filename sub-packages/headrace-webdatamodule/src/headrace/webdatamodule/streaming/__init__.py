"""How ranks and workers share a stream of samples, and how it goes on in the middle. Pure but for the readers."""
