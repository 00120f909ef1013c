"""Random clusters and jobs for tests of the planner, and layouts of all kinds on them.

Everything comes from a `Random`, so a number is a cluster: a test that fails names it, and `reproduce` prints
cluster file and job.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from random import Random

from megatron_hexi.cluster import cluster_from_yaml
from megatron_hexi.errors import ClusterError
from megatron_hexi.models import Job, Model
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.yaml_file import read_yaml


def read_text(text):
    """The cluster of a cluster file's text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(text)
        return cluster_from_yaml(read_yaml(path))


def reproduce(text, job):
    """What a report of a fault needs: the cluster file and the job."""
    return f"\n{text}\n{job!r}"


def log_uniform(random, low, high):
    return math.exp(random.uniform(math.log(low), math.log(high)))


def random_cluster_text(random, gpus, most_nodes=4, even=False):
    """A cluster file of so many GPUs: one to three models of them, one to `most_nodes` nodes.

    Args:
        random: where all of it comes from.
        gpus: in all.
        most_nodes: at most.
        even: whether all nodes have the same number of GPUs, where that can be.
    """
    names = [f"D{number}" for number in range(random.choice([1, 2, 2, 3]))]
    nodes = random.randint(1, min(gpus, most_nodes))
    if even and gpus % nodes == 0:
        sizes = [gpus // nodes] * nodes
    else:
        sizes = [1] * nodes
        for _ in range(gpus - nodes):
            sizes[random.randrange(nodes)] += 1
    lines = [f"name: random-{gpus}", "nodes:"]
    for number, size in enumerate(sizes):
        words = f"name: n{number}, gpu: {random.choice(names)}, gpus: {size}"
        if random.random() < 0.15:
            words += f", speed: {random.choice([0.5, 0.8, 0.95])}"
        if random.random() < 0.3:
            intra = (
                f"bandwidth_gb_s: {log_uniform(random, 2, 400):.4g}, latency_us: {random.choice([0, 2, 20])}"
            )
            words += f", intra: {{{intra}}}"
        lines.append(f"- {{{words}}}")
    lines += _between(random, nodes)
    lines.append("devices:")
    for name in names:
        lines += _device(random, name)
    return "\n".join(lines) + "\n"


def _between(random, nodes):
    """Thick and thin, a card for each GPU or one a node; racks, or a measured matrix, now and then."""
    if nodes > 1 and random.random() < 0.1:
        rows = [[round(log_uniform(random, 1, 100), 3) for _ in range(nodes)] for _ in range(nodes)]
        waits = [[random.choice([0, 5, 30]) for _ in range(nodes)] for _ in range(nodes)]
        listed = ", ".join(f"n{number}-0" for number in range(nodes))
        return ["matrix:", f"  nodes: [{listed}]", f"  bandwidth_gb_s: {rows}", f"  latency_us: {waits}"]
    words = (
        f"bandwidth_gb_s: {log_uniform(random, 0.5, 200):.4g}, latency_us: {random.choice([0, 5, 10, 50])}"
    )
    lines = [f"network: {{{words}, per: {random.choice(['gpu', 'node'])}}}"]
    if nodes > 2 and random.random() < 0.3:
        cut = random.randint(1, nodes - 1)
        groups = [[f"n{number}" for number in part] for part in (range(cut), range(cut, nodes))]
        listed = ", ".join(f"[{', '.join(group)}]" for group in groups)
        speed, wait = log_uniform(random, 0.5, 100), random.choice([0, 5, 100])
        words = f"groups: [{listed}], bandwidth_gb_s: {speed:.4g}, latency_us: {wait}"
        lines.append(f"levels: [{{name: rack, {words}, per: {random.choice(['group', 'node', 'gpu'])}}}]")
    return lines


def _device(random, name):
    """Token work and attention need not go together; curves are flat, rise with the size, or fall at last."""
    matmul = log_uniform(random, 50, 800)
    forward = matmul * log_uniform(random, 0.25, 1.1)
    shape = random.random()

    def curve(rate):
        points = [[1, rate]]
        if shape < 0.5:
            points = [[1024, rate * 0.6], [32768, rate]]
        elif shape > 0.9:
            points = [[1024, rate * 0.8], [4096, rate], [32768, rate * 0.85]]
        return "{points: [" + ", ".join(f"[{n}, {r:.5g}]" for n, r in points) + "], source: test}"

    rates = [forward, forward * random.uniform(0.6, 1.0)]
    full = [rate * random.uniform(1.0, 1.2) for rate in rates]
    memory = random.choice([2.5, 4, 8, 64, 64, 64])
    link = f"bandwidth_gb_s: {log_uniform(random, 5, 400):.4g}, latency_us: {random.choice([0, 2, 10])}"
    return [
        f"  {name}:",
        f"    memory_gb: {memory * 1.25}",
        f"    usable_gib: {memory}",
        f"    memory_gb_s: {log_uniform(random, 300, 4000):.4g}",
        "    capability: [8, 0]",
        f"    nominal: {{bf16: {matmul * 1.5:.4g}, fp16: {matmul * 1.5:.4g}, fp32: {matmul / 8:.4g}}}",
        f"    link: {{kind: test, {link}, source: test}}",
        f"    matmul: {curve(matmul)}",
        "    attention:",
        "      flash-attn-2:",
        f"        causal: {{forward: {curve(rates[0])}, backward: {curve(rates[1])}}}",
        f"        full: {{forward: {curve(full[0])}, backward: {curve(full[1])}}}",
        "    source: test",
    ]


def device_text(name, matmul, attention, memory=64):
    """A GPU's entry: rates of matrices and of attention (TFLOP/s), the same at every size, and usable GiB.

    Its own memory is so fast that only these rates count.
    """
    curve = "{{points: [[1, {}]], source: test}}".format
    passes = f"{{forward: {curve(attention)}, backward: {curve(attention)}}}"
    return f"""\
  {name}:
    memory_gb: {memory * 1.25}
    usable_gib: {memory}
    memory_gb_s: 100000
    capability: [8, 0]
    nominal: {{bf16: 1000, fp16: 1000, fp32: 100}}
    link: {{kind: test, bandwidth_gb_s: 100, latency_us: 0, source: test}}
    matmul: {curve(matmul)}
    attention: {{flash-attn-2: {{causal: {passes}, full: {passes}}}}}
    source: test
"""


def random_job(
    random, lengths=(1024, 4096, 16384, 65536), layers=(1, 2, 3), heads=(1, 2, 3, 4, 5, 6), **changes
):
    """A small model, dense attention or grouped queries, on a sequence of any length."""
    count, tensor_parallel = random.choice(heads), changes.get("tensor_parallel", 1)
    shared = [kv for kv in range(1, count + 1) if count % kv == 0]
    hidden = random.choice([256, 512, 1024])
    model = Model(
        name="random",
        layers=random.choice(layers),
        hidden_size=hidden,
        heads=count,
        kv_heads=random.choice(
            [kv for kv in shared if kv % tensor_parallel == 0 or tensor_parallel % kv == 0]
        ),
        head_dim=random.choice([64, 128]),
        ffn_hidden_size=hidden * random.choice([2, 4]),
        gated=random.random() < 0.5,
        vocab_size=random.choice([1024, 8192]),
        tied_embeddings=random.random() < 0.5,
    )
    length = random.choice(lengths) + random.choice([0, 0, 0, random.randint(1, 777)])
    fields = {
        "global_batch_size": random.choice([1, 1, 2, 4]),
        "recompute": random.choice(["none", "none", "selective", "full"]),
        "overlap_gradients": random.random() < 0.8,
        "distributed_optimizer": random.random() < 0.8,
    }
    return Job(model=model, seq_length=length, **(fields | changes))


def random_case(seed, gpus=(2, 2, 3, 3, 3, 4, 4, 5), **changes):
    """The text of a cluster, the cluster, and a job for it, by a number."""
    random = Random(seed)
    text = random_cluster_text(random, random.choice(gpus))
    return text, read_text(text), random_job(random, **changes)


def random_parallel_case(seed, gpus=(2, 3, 4, 6, 8), batches=(2, 4, 8)):
    """The same, with tensor and pipeline parallelism now and then, larger batches and longer sequences."""
    random = Random(seed)
    tensor, stages = random.choice([1, 1, 2]), random.choice([1, 1, 2])
    text = random_cluster_text(random, random.choice(gpus), even=random.random() < 0.5)
    job = random_job(
        random,
        lengths=(1024, 8192, 32768, 131072),
        layers=(2, 4),
        heads=(2, 4, 6, 8) if tensor > 1 else (1, 2, 3, 4, 6, 8),
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        micro_batch_size=random.choice([1, 1, 2]),
        global_batch_size=random.choice(batches),
    )
    return text, read_text(text), job


def random_fleets(first, last, **changes):
    """For each number a `Random` and the units of its `random_parallel_case`, where it has any."""
    for seed in range(first, last):
        _, known, job = random_parallel_case(seed, **changes)
        try:
            yield Random(seed), find_units(job, known)
        except ClusterError:
            continue


def random_layouts(random, fleet, data_parallel):
    """Layouts of any kind on some of a fleet's units, one a replica.

    Groups are whole sites, single units or anything, over any sites; tokens and heads in proportion to speed,
    or dealt out anyhow, so that some members have none.

    Args:
        random: where all of it comes from.
        fleet: the units.
        data_parallel: replicas, equal in units and micro-batches; ``None``: any.
    """
    job = fleet.job
    together = job.global_batch_size // job.micro_batch_size
    units = random.sample(range(len(fleet.units)), len(fleet.units))
    if data_parallel is None:
        count = random.randint(1, min(len(units), together))
        cuts = sorted(random.sample(range(1, len(units)), count - 1))
        dealt = [units[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(units)])]
        cuts = sorted(random.sample(range(1, together), count - 1))
        turns = [stop - start for start, stop in itertools.pairwise([0, *cuts, together])]
    else:
        size = random.choice([random.randint(1, len(units) // data_parallel), len(units) // data_parallel])
        dealt = [units[number * size : (number + 1) * size] for number in range(data_parallel)]
        turns = [together // data_parallel] * data_parallel
    return [_random_layout(random, fleet, *replica) for replica in zip(dealt, turns, strict=True)]


def _random_layout(random, fleet, units, micro_batches):
    way = random.choice(["site", "single", "any", "any", "one"])
    places = {
        "site": lambda unit: fleet.units[unit].site,
        "single": lambda unit: unit,
        "any": lambda unit: random.randrange(1 + len(units) // 2),
        "one": lambda unit: 0,
    }
    groups: dict[int, list[int]] = {}
    for unit in units:
        groups.setdefault(places[way](unit), []).append(unit)
    speed = [fleet.kinds[unit.kind].tokens_per_s for unit in fleet.units]
    heads = fleet.job.workload().local_heads
    parts = []
    fair = random.random() < 0.6
    for members in groups.values():
        weights = [speed[unit] if fair else random.choice([0, 1, random.random()]) for unit in members]
        weights = weights if any(weights) else [1] * len(members)
        dealt = apportion(
            heads, [speed[unit] if random.random() < 0.7 else random.random() for unit in members]
        )
        parts.append((tuple(members), weights, tuple(dealt)))
    totals = apportion(fleet.job.seq_length, [sum(weights) for _, weights, _ in parts])
    return Layout(
        tuple(
            A2AGroup(members, tuple(apportion(total, weights)), dealt)
            for total, (members, weights, dealt) in zip(totals, parts, strict=True)
        ),
        micro_batches,
    )
