"""The page's own sentences; everything with a number that can change is put together in page.py."""

INTRODUCTION = """\
# The suite, simulated

**Simulated: nothing on this page was measured on a GPU.** Every number, of baselines too, is a prediction of
the [cost model](../cost-model.md).

Written by `python -m benchmarks.simulation` with megatron-hexi {version} (`--page`: from
[simulation.json](simulation.json), which has every cell); do not edit. The bound counts no
communication, so a part of each gap is its own.

Models, sequence lengths, numbers of GPUs and links are those of HexiSeq
([arXiv 2605.07569](https://arxiv.org/abs/2605.07569)); the make-up of some
[clusters](../../benchmarks/simulation/clusters) is ours.

- *Strongest uniform*: the best of Ring, Ulysses, USP and Transformer Engine's a2a+p2p; all GPUs have equal
  tokens and heads.
- *All baselines*: those, tokens in proportion to speed, and the GPUs of one model alone.
- *Ceiling*: all GPUs at their best achieved rates, with nothing to send.
- *Bound*: tokens/s that no plan can pass. *Gap*: how much longer the plan's iteration is than the bound's."""

ASSUMED = """\
- **Rates** are achieved ones from the catalogue: FlashAttention-3 on H100, FlashAttention-2 elsewhere; those
  of the L40S are estimates.
- **Links**: NVLink 450 GB/s (H100), 300 (A100), 200 (A800), PCIe 25.6 (L40S); RDMA 25 GB/s a GPU between
  nodes, a direction each. Latencies of 5 to 10 us are ours. The fabric never jams.
- **Jobs**: GPT decoders with as many KV heads as heads, bf16, full recomputation, distributed optimizer,
  overlapped gradients, micro-batches of one sequence, 8 sequences an iteration.
- **Tensor- and pipeline-parallel sizes** are the same for every method of a cell: the fewest GPUs, up to 16,
  with which some uniform layout fits."""

SECTIONS = {
    "short": "Means are geometric, over the cells in which a uniform layout fits.",
    "speed-up.png": "Full lines: over the strongest uniform. Dotted: over all baselines.",
    "ceiling.png": "Part of the ceiling: the plan, the bound above it, the strongest uniform below.",
    "one-cluster.png": "One mixed cluster in full. Blue bars are uniform layouts.",
}
