"""Where the ranks of a test meet: a store of this process, at a port that the system gives and nobody can take."""

import sys

import torch.distributed as dist


class Meeting:
    """Keep it until the ranks have ended.

    Args:
        world: Number of ranks.
    """

    def __init__(self, world: int) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store, as it does under torchrun
            "WORLD_SIZE": str(world),
        } | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
