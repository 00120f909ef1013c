"""The page's own sentences; everything with a number that can change is put together in page.py."""

# The sentence on the wider search goes when the whole suite is planned again.
INTRODUCTION = """\
# The suite, simulated

**Simulated: nothing on this page was measured on a GPU.** Every number is a prediction of the [cost
model](../cost-model.md), for the plan and for the baselines alike.

Written by `python -m benchmarks.simulation` with megatron-hexi {version}; do not edit. Every cell, with its
layouts and baselines, is in [simulation.json](simulation.json); how long planning took is in
`simulation-times.json`. The saved cells are those of an earlier version's wider search (`--thorough`) and of
its bound, which counted communication; the planner and the bound of today are others.

The suite is that of HexiSeq ([arXiv 2605.07569](https://arxiv.org/abs/2605.07569)), which has no public
code: models, sequence lengths, numbers of GPUs and links are the paper's. Where its make-up of a cluster is
not known, it is ours ([clusters](../../benchmarks/simulation/clusters)).

- *Strongest uniform*: the best of Ring, Ulysses, USP and Transformer Engine's a2a+p2p, with the best degrees,
  order of machines and window. All GPUs of the cluster get equal tokens and heads.
- *All baselines*: those, tokens in proportion to speed, and the GPUs of one model alone.
- *Ceiling*: all of the cluster's GPUs at their best achieved rates, with nothing to send.
- *Bound*: tokens/s that no plan can pass. *Gap*: how much longer the plan's iteration is than the bound's."""

ASSUMED = """\
- **Rates** are achieved ones from the device catalogue, by size and by kernel: FlashAttention-3 on H100,
  FlashAttention-2 elsewhere. Every rate of the L40S is an estimate. HexiSeq names no kernels.
- **Links**: NVLink 450 GB/s (H100), 300 (A100), 200 (A800), PCIe 25.6 (L40S); RDMA 25 GB/s a GPU between
  nodes, a direction each. Latencies of 5 to 10 us are ours. The fabric between nodes never jams.
- **Jobs**: GPT decoders with as many KV heads as heads, bf16, full recomputation, distributed optimizer,
  overlapped gradients, micro-batches of one sequence, 8 sequences an iteration, causal mask.
- **Tensor- and pipeline-parallel sizes** are given, the same for every method of a cell, and chosen for the
  baselines: the fewest GPUs, up to 16, with which some uniform layout fits.
- Plan and baselines have the same kernels, overlap and exchange. A cell in which no uniform layout fits
  counts in no mean. Jitter, throttling, launch times and a jammed network are not modelled.
- For every plan, the messages of each rank's attention layer, as the runtime would send them (on torch's meta
  tensors), have exactly the bytes that the cost model counted
  ([wire.py](../../benchmarks/simulation/wire.py))."""

SECTIONS = {
    "short": """\
Left out: a plan fits, and no uniform layout does. The bound's column is the geometric mean that the best
conceivable plan would have.""",
    "speed-up.png": """\
Full lines: over the strongest uniform baseline. Dotted: over the strongest of all baselines.""",
    "ceiling.png": """\
Part of the ceiling: the plan, the bound above it, the strongest uniform baseline below.""",
    "one-cluster.png": "One mixed cluster in full. Blue bars are uniform layouts.",
}

HOW = """\
## Again

```
python -m benchmarks.simulation                               # all of it
python -m benchmarks.simulation --only 'simulation/sim-64/*'  # some cells; the rest is kept
python -m benchmarks.simulation --page                        # page and pictures from simulation.json
python -m benchmarks.simulation --plans plans/                # keep every plan as a file
```"""
