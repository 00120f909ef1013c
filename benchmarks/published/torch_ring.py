"""Seconds of torch's context parallelism in torchtitan, of December 2024, beside attention itself.

Its rules, by torchtitan at 9dec370 and torch's `torch/distributed/tensor/experimental/_attention.py` of that
time (names below are theirs):

- keys and values are repeated for all query heads before attention (`repeat_kv`, models/llama/model.py), so
  heads of queries travel, not of keys;
- a pass gathers the keys and values of all ranks once (`_AllGatherRotater`, the default
  `context_parallel_rotate_method`); gradients travel around the ring in fp32, one step for each rank
  (`dkv_rotater`, always `_AllToAllRotater`);
- blocks are compiled whole (`apply_compile`), and a collective that is traced is waited for where it stands
  (`_maybe_wrap_tensor`, torch/distributed/_functional_collectives.py): nothing is hidden
  (`reorder_for_compute_comm_overlap`, torch/_inductor/config.py, is off);
- outputs and gradients of steps are summed in fp32 tensors of all rows (`_SDPAMerger`, `_partial_update`).
  Fused, as the compiler does, an element is read in fp32 and in bf16, and written in fp32.
"""

from __future__ import annotations

from benchmarks.published.tables import Row
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.moved_bytes import HBM_SHARE
from megatron_hexi.models import Job

#: Bytes of an element of keys and values that are gathered, of their gradients, and of a sum.
_GATHERED, _GRADIENT, _SUM = 2, 4, 4 + 2 + 4


def ring_seconds(row: Row, job: Job, cluster: Cluster) -> float:
    """Return the seconds of an iteration that ranks wait for each other's keys, and sum, in all layers.

    Args:
        row: a row whose ranks share sequences.
        job: what it trains.
        cluster: what it runs on.
    """
    steps, tensor = row.parallel, row.tensor
    elements = row.micro * job.seq_length / steps * job.model.heads / tensor * job.model.head_dim
    link = cluster.bandwidth(0, tensor)
    memory = cluster.ranks[0].device.memory_gb_s * 1e9 * HBM_SHARE
    gather = (steps - 1) * 2 * elements * _GATHERED / link
    forward = gather + (steps - 1) * elements * _SUM / memory
    backward = gather + steps * (2 * elements * _GRADIENT / link + 3 * elements * _SUM / memory)
    again = forward if row.recompute == "full" else 0.0
    micro_batches = row.batch / (row.micro * row.data)
    return (micro_batches + row.pipeline - 1) * job.model.layers / row.pipeline * (forward + again + backward)
