"""Texts of good cluster files."""

#: As in the design's commands.md.
GOOD = """\
name: mixed-16
nodes:
- {name: h100, count: 1, gpu: H100-SXM-80GB, gpus: 8}
- {name: a100, count: 1, gpu: A100-SXM-80GB, gpus: 8}
network: {bandwidth_gb_s: 25, latency_us: 10}     # between nodes
"""

MATRIX = """\
name: measured
nodes:
- {name: a, count: 2, gpu: H100-SXM-80GB, gpus: 2}
- {name: b, gpu: A100-SXM-80GB, gpus: 2}
matrix:
  nodes: [a-0, a-1, b-0]
  bandwidth_gb_s:
  - [0, 40, 5]
  - [41, 0, 6]
  - [5, 6, 0]
  latency_us:
  - [0, 10, 30]
  - [10, 0, 30]
  - [30, 30, 0]
"""

LEVELS = """\
name: racks
nodes:
- {name: a, count: 4, gpu: H100-SXM-80GB, gpus: 8}
- {name: b, gpu: A100-SXM-80GB, gpus: 8}
network: {bandwidth_gb_s: 50, per: gpu}
levels:
- {name: rack, groups: [[a-0..1], [a-2..3, b]], bandwidth_gb_s: 100}
- {name: site, groups: [[a, b]], bandwidth_gb_s: 10, latency_us: 1000}
"""

FABRICS = """\
name: fleet
nodes:
- {name: h, count: 2, gpu: H100-SXM-80GB, gpus: 8, network: {cards: 8, gbit_s: 400, fabric: infiniband}}
- {name: l, gpu: L40S-48GB, gpus: 4, network: {gbit_s: 100, fabric: roce}}
fabrics:
- {meet: [infiniband, roce], gbit_s: 100, per: node}
"""

DEVICE = """
devices:
  H100-SXM-80GB:
    matmul: {points: [[1024, 500], [4096, 700]], source: probe}
"""
