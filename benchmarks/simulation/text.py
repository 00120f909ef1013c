"""The page's own sentences; everything with a number that can change is put together in page.py."""

INTRODUCTION = """\
# The suite, simulated

Written by `python -m benchmarks.simulation` with megatron-hexi {version}; do not edit. The suite is that
of HexiSeq ([arXiv 2605.07569](https://arxiv.org/abs/2605.07569)), which has no public code: models,
contexts, numbers of GPUs and links are the paper's. Where its make-up of a cluster is not known, it is
ours, and stands in [benchmarks/simulation/clusters](../../benchmarks/simulation/clusters).

**Nothing here was measured on a GPU.** Every number is a prediction of the [cost
model](../cost-model.md), for the plan and for the baselines alike. What can be read off are ratios under
that model, and how far a plan is from what no plan can pass.

- *Strongest uniform*: the best of Ring, Ulysses, USP (all divisors of the ranks, consecutive and strided)
  and Transformer Engine's a2a+p2p, each with its best order of machines and its best window. All of the
  cluster's GPUs get equal tokens and heads.
- *Strongest of all*: those, and two that a careful user could write by hand: tokens in proportion to
  speed, and the GPUs of one model alone.
- *Ceiling*: all of the cluster's GPUs, used or not, at their best achieved rates at once, with nothing to
  send and nothing to wait for.
- *Bound*: tokens/s that no plan can pass, communication counted; proven, not searched.
- *Gap*: how much longer the plan's iteration is than the bound's, as a part of the bound's."""

ASSUMED = """\
- **Rates** are achieved ones from the device catalogue, by size and by kernel: matrices 792 TFLOP/s on
  H100, 268 on A100; attention with FlashAttention-3 on H100 and FlashAttention-2 elsewhere (616 and 197
  TFLOP/s, causal forward). An A800 is an A100 with a slower NVLink. Every rate of the L40S is an
  estimate: nobody whom we trust has published one.
- HexiSeq does not say which kernels it ran. Where both kinds of GPU run FlashAttention-2, mixed clusters
  have less to win: a table below repeats the 7B testbeds with it.
- **Links**: NVLink 450 GB/s (H100), 300 (A100), 200 (A800), PCIe 25.6 for the L40S; RDMA 25 GB/s between
  nodes, a direction each. The paper does not tell whether a card is a GPU's or a node's: one card for
  each GPU is assumed, as in a DGX A100. Latencies of 5 µs inside and 10 µs between nodes are ours (the
  L40S: 10 µs inside). The fabric between nodes never jams.
- **Jobs**: GPT decoders with as many KV heads as heads, bf16, full recomputation, distributed optimizer,
  gradients overlapped, micro-batches of one sequence, 8 sequences an iteration, causal mask over the
  whole context.
- The plan and every baseline have the same kernels, the same overlap and the same exchange. A length that
  the ranks do not divide is dealt out one token more to some, for Ring, Ulysses and USP too.
- A cell in which no uniform layout fits in memory is no win: it shows a dash, and no mean counts it.
- Jitter, throttling, launch times and a jammed network are not in the model: see "Known to be wrong"
  there."""

UNITS = """\
Tensor- and pipeline-parallel sizes (TP x PP) are given, the same for every method of a cell, and chosen
for the baselines: the fewest GPUs, up to 16, with which some uniform layout fits; of equal ones, those
with which the strongest uniform layout is fastest. Where no uniform layout fits at all: those with which
a plan is fastest."""

NO_UNIFORM = "Where no uniform layout fits, or nothing does: why"

PAIRS_TEXT = """\
HexiSeq compares 48 H100 and 8 A100 with 152 A100, and 52 H100, 4 A100 and 8 A800 with 168 A100: equal in
nominal FLOPs up to 5 %. Nominal FLOPs are not what either side reaches, so the ratio in bold divides each
side's throughput by its own achieved FLOPs (its ceiling). Both sides get their best plan; TP x PP is the
same on both.

152 and 168 GPUs are no usable Ulysses degrees for 40 or 64 heads: one group of all ranks cannot be laid
out. The homogeneous side's baseline is therefore USP, with Ulysses inside groups whose size divides both
the ranks and the heads, and a ring over the groups; the table of layouts says which."""

SECTIONS = {
    "short": """\
Cells with one replica. Left out: a plan fits, and no uniform layout does. The bound's column is what the
best conceivable plan would have as a geometric mean.""",
    "speed-up.png": """\
Full lines: over the strongest uniform baseline. Dotted: over the strongest of all baselines. There is no
point where no such baseline fits in memory.""",
    "ceiling.png": """\
Part of the ceiling: the plan, the bound above it, the strongest uniform baseline below.""",
    "one-cluster.png": "One mixed cluster in full. Blue bars are uniform layouts.",
    "auto": """\
The number of replicas is free, for the plan (equal or not) and for every baseline (equal ones, any number
that divides the ranks and the batch). TP x PP as above.""",
    "kernel": """\
The 7B testbeds once more with FlashAttention-2 on the H100 too, as HexiSeq may have had it: the H100 then
does attention 1.7 times as fast as the A100, matrices still 3 times.""",
    "random": """\
Twenty clusters drawn from a fixed seed: 2 to 8 nodes of 1 to 8 GPUs, of two to four models with bf16 and
at least 24 GB, 5 to 50 GB/s for a node or for each GPU. TP x PP is 1 x 1, for nodes have any number of
GPUs. Where a uniform layout must drag a slow card behind a thin link along, its ratio says little.""",
    "wire": """\
For every plan above, each rank's whole attention layer, forward and backward, runs through the runtime's
own split tables and buffers on torch's meta tensors (shapes without contents). Each message that it would
send or receive, to or from each rank in each step, has exactly the bytes that the cost model counted; one
byte more or less fails the run ([wire.py](../../benchmarks/simulation/wire.py)).""",
    "times": """\
Seconds to plan one cell, baselines included, on the machine that wrote this page: two shared cores, two cells
at a time. These differ by machine; all else on this page does not.""",
}

HOW = """\
## Again

```
python -m benchmarks.simulation                               # all of it
python -m benchmarks.simulation --only 'simulation/sim-64/*'  # some cells; the rest is kept
python -m benchmarks.simulation --page                        # page and pictures from simulation.json
python -m benchmarks.simulation --plans plans/                # keep every plan as a file
```"""
