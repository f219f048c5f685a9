"""What all data-parallel ranks tell one another: values as text, gathered from every rank."""

import json
from typing import Any

import torch.distributed as dist

from headrace.size_aware_batching._shared.ranks import Mesh, process_group


def gather(value: str, mesh: Mesh | None = None) -> list[str] | None:
    """Return the values of all ranks, or None where there is no process group to ask.

    It is a collective: every rank of the mesh's group, or of the default group, has to call it.
    """
    if process_group() is None:
        return None
    group = None
    if mesh is not None:
        get_group = getattr(mesh, "get_group", None)
        if not callable(get_group):
            return None
        group = get_group()
    values = [""] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_json(value: Any, mesh: Mesh | None = None) -> list[Any]:
    """Return a JSON value of every rank; this one's alone where there is no process group. A collective, too."""
    return [json.loads(each) for each in gather(json.dumps(value), mesh) or [json.dumps(value)]]
