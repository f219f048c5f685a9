"""Two ranks read ahead in threads of grain; one has read several epochs before the other begins.

An exchange of the reading threads would pair with one of the loop's, or wait for it for ever.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from grain.experimental import ThreadPrefetchIterDataset

from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.webdatamodule.integrations.grain import GrainDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
loader = ResumableLoader(list(range(48)), DistributedBatchSampler(48, 4), collate_fn=list)
batches = iter(ThreadPrefetchIterDataset(GrainDataset(loader, num_epochs=3), prefetch_buffer_size=100))
seen = torch.zeros(48, dtype=torch.int64)
if dist.get_rank() == 0:
    seen[next(batches)] += 1
dist.barrier()
for batch in batches:
    seen[batch] += 1
    dist.barrier()
if dist.get_rank() == 0:
    dist.barrier()  # for the batch that it took before the loop
dist.all_reduce(seen)
assert seen.tolist() == [3] * 48, seen
if dist.get_rank() == 0:
    print("every sample once in each epoch", flush=True)
dist.destroy_process_group()
