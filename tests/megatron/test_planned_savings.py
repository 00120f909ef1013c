"""Plans that save memory, as the planner finds them on small GPUs, train as one rank does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_hexi.cluster import read_cluster
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import JobTerms, read_plan, write_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.notes import spell_savings
from tests.megatron.conftest import References, job
from tests.megatron.forked import Forks
from tests.megatron.test_stages_training import MICRO_BATCH, MICRO_BATCHES, MODEL, words
from tests.megatron.test_uneven_training import SEQ_LENGTH, largest_difference

GPUS = ("H100-SXM-80GB", "L40S-48GB")
#: What libraries keep for themselves, by the cost model.
RESERVE_GIB = 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room_mib", "saved"),
    [(24, "2 ministages"), (8, "6 ministages, host memory holds"), (6, "2 ministages, host memory holds")],
)
def test_a_plan_that_saves_memory_trains_as_one_rank(
    room_mib: int, saved: str, forks: Forks, references: References, tmp_path: Path
):
    nodes = [{"name": gpu[:4], "gpu": gpu, "gpus": 2, "count": 1} for gpu in GPUS]
    room = {gpu: {"usable_gib": RESERVE_GIB + room_mib / 1024} for gpu in GPUS}
    network = {"bandwidth_gb_s": 5, "latency_us": 10, "per": "node"}
    document = {"name": "small", "nodes": nodes, "network": network, "devices": room}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "model.args").write_text(" ".join(job(MODEL)))
    terms = Job(
        model=read_model(str(tmp_path / "model.args")),
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * MICRO_BATCHES,
        precision="fp32",
    )
    request = Request(terms, frozenset({"micro_batch_size"}))
    found = find_plan(request, read_cluster(tmp_path / "cluster.yaml")).plan
    assert saved in spell_savings(found)
    write_plan(replace(found, job=JobTerms(micro_batch_size=MICRO_BATCH)), tmp_path / "plan.yaml")
    plan = read_plan(tmp_path / "plan.yaml")
    weights, reference = references(MODEL, 2)
    log = forks.train(tmp_path, ranks=plan.ranks, args=words(MODEL, 2, weights, ()), plan=plan)
    assert largest_difference(log, reference) < 1e-5
