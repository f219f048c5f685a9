"""How ranks and workers share a stream of samples, and how it resumes in the middle of an epoch."""
