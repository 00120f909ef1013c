"""Clusters for the testbed, as files."""

from __future__ import annotations

CLUSTER = """\
name: pair
nodes:
- {{name: fast, gpu: core, gpus: {gpus}}}
- {{name: slow, gpu: core, gpus: {gpus}, speed: 0.5}}
network: {{bandwidth_gb_s: {bandwidth}, latency_us: 20, per: node}}
devices:
  core:
    memory_gb: {memory}
    usable_gib: {memory}
    memory_gb_s: 1000
    capability: [0, 0]
    nominal: {{bf16: {rate}, fp32: {rate}}}
    link: {{kind: veth, bandwidth_gb_s: 0.125, latency_us: 20, estimate: chosen}}
    matmul: {{points: [[1, {rate}]], estimate: chosen}}
    attention:
      aten-cpu:
        causal:
          forward: {{points: [[1, {rate}]], estimate: chosen}}
          backward: {{points: [[1, {rate}]], estimate: chosen}}
        full:
          forward: {{points: [[1, {rate}]], estimate: chosen}}
          backward: {{points: [[1, {rate}]], estimate: chosen}}
"""


def pair(*, gpus=1, rate=0.02, memory=4, bandwidth=0.0125):
    """Two nodes, the second half as fast; rates in TFLOP/s, memory in GiB, between nodes GB/s."""
    return CLUSTER.format(gpus=gpus, rate=rate, memory=memory, bandwidth=bandwidth)
