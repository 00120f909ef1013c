"""Clusters and jobs for tests of the cost model: round numbers that can be worked out by hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_hexi.cluster import cluster_from_yaml
from megatron_hexi.cost.memory import part_params
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.plan_arrays import domain_arrays
from megatron_hexi.models import Job, Model
from megatron_hexi.yaml_file import read_yaml

#: 100 TFLOP/s in everything at every size, memory at 1000 GB/s; DOUBLE computes twice as fast.
_DEVICE = """\
  {name}:
    memory_gb: 80
    usable_gib: 64
    memory_gb_s: 1000
    capability: [8, 0]
    nominal: {{bf16: 100, fp16: 100, fp32: 10}}
    link: {{kind: test, bandwidth_gb_s: 100, latency_us: 0, source: test}}
    matmul: {curve}
    attention:
      flash-attn-2:
        causal: {{forward: {curve}, backward: {curve}}}
        full: {{forward: {curve}, backward: {curve}}}
    source: test
"""

#: 2 layers of 4 heads of 128; matrices: 512 x 128 x 16 + 2 x 512 x 2048 = 3145728 weights a layer.
TINY = Model(
    name="tiny",
    layers=2,
    hidden_size=512,
    heads=4,
    kv_heads=4,
    head_dim=128,
    ffn_hidden_size=2048,
    gated=False,
    vocab_size=1024,
    tied_embeddings=True,
)


def cluster(nodes, bandwidth=10, latency=0, per="gpu", extra=""):
    """A cluster of nodes given as (name, GPU, how many of it), with the plain devices PLAIN and DOUBLE."""
    entries = "".join(f"- {{name: {name}, gpu: {gpu}, gpus: {gpus}}}\n" for name, gpu, gpus in nodes)
    network = f"network: {{bandwidth_gb_s: {bandwidth}, latency_us: {latency}, per: {per}}}\n"
    devices = "".join(
        _DEVICE.format(name=name, curve=f"{{points: [[1, {rate}]], source: test}}")
        for name, rate in (("PLAIN", 100), ("DOUBLE", 200))
    )
    text = f"name: test\nnodes:\n{entries}{network}devices:\n{devices}{extra}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(text)
        return cluster_from_yaml(read_yaml(path))


def tiny_job(**changes):
    """A job for TINY: one sequence of 4096 tokens."""
    return Job(**{"model": TINY, "seq_length": 4096, "global_batch_size": 1, **changes})


#: Sizes of the products in a layer of TINY: queries, keys and values; projection; both of the MLP.
TINY_PRODUCTS = ((512, 1536), (512, 512), (512, 2048), (2048, 512))


def rate_alone(rate, element=2):
    """Return the rate of products on such a device without the time in which they write, FLOP/s.

    The curve is of three products of 4096 to 16384 columns and many rows, which write 4096 and 16384 columns.
    """
    return 1 / (1 / rate - (4096 + 16384) * element / 0.9e12 / (6 * 4096 * 16384))


def products_by_hand(rows, *sizes, rate=100e12, element=2, gradient=8):
    """Seconds forward and backward of products, each in x out columns of so many rows, which compute
    bounds."""
    forward = backward = 0.0
    for into, out in sizes:
        work = 2 * rows * into * out / rate_alone(rate, element)
        forward += work + rows * out * element / 0.9e12
        backward += 2 * work + (rows * into * element + into * out * gradient) / 0.9e12
    return forward, backward


def plan_arrays(plan):
    """The arrays of all units of a plan whose one stage the job repeats."""
    return domain_arrays(plan.workload, [replica.domain for replica in plan.replicas], plan.exchange.parts)


def stage_params(job, stage):
    """Weights on one GPU of a pipeline stage, for a job with equal stages."""
    return int(part_params(job, ModelPart.of_job(job, stage)))
