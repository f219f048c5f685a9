"""What the packages of headrace share: they do not import one another, so each that needs a file has a copy.

The files of size-aware-batching are the originals; ``scripts/sync_shared`` copies them.
"""
