"""Which rank this process is, and of how many."""

import torch.distributed as dist


def process_group() -> tuple[int, int] | None:
    """Return the default process group's (world size, rank), or None when there is no group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None


def resolve(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Fill in what was not given from the process group, or with one single rank.

    Args:
        num_replicas: Number of ranks, or None.
        rank: This rank, or None.

    Returns:
        World size and rank.

    Raises:
        ValueError: If the rank lies outside the world, or cannot be known.

    >>> resolve(4, 2), resolve(None, None)
    ((4, 2), (1, 0))
    """
    group = process_group()
    if rank is None and group is None and num_replicas not in (None, 1):
        raise ValueError(
            f"num_replicas={num_replicas} was given without rank, and torch.distributed is not initialised: "
            "every process would take rank 0 and read the same samples. Give rank as well, or call "
            "torch.distributed.init_process_group first"
        )
    if num_replicas is None and group is None and rank not in (None, 0):
        raise ValueError(
            f"rank={rank} was given without num_replicas, and torch.distributed is not initialised; give "
            "num_replicas as well, or call torch.distributed.init_process_group first"
        )
    world_size, own_rank = group or (1, 0)
    world_size = world_size if num_replicas is None else num_replicas
    own_rank = own_rank if rank is None else rank
    if not 0 <= own_rank < world_size:
        raise ValueError(f"rank must be from 0 to num_replicas - 1, got rank={own_rank} with num_replicas={world_size}")
    return world_size, own_rank
