"""The measurement of planning itself runs."""

import json

import pytest

from benchmarks.planning import DEVICES, main, measure, mixed_fleet, random_task
from megatron_hexi.models import Job, read_model


def test_it_runs_and_says_what_it_measured(capsys):
    main(["--gpus", "8", "--seq-length", "65536", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["gpus"], row["model"]) for row in rows] == [(8, "gpt-7b"), (8, "gpt-13b")]
    for row in rows:
        assert row["planning_s"] > 0
        assert row["peak_mib"] >= 0
        assert row["trials"] > 0
        assert 0 <= row["gap"] < 1
        assert row["stages"] >= row["replicas"] >= 1


def test_a_job_that_does_not_fit_is_a_row_too():
    assert measure(mixed_fleet(8), Job(read_model("gpt-7b"), 2**24)).gap is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("gpus", [16, 128])
def test_random_fleets_have_as_many_gpus_as_asked_for(gpus, seed):
    fleet, job = random_task(gpus, seed)
    assert len(fleet.cluster().ranks) == gpus
    assert (fleet, job) == random_task(gpus, seed)
    assert fleet != random_task(gpus, seed + 100)[0]


def test_clusters_are_a_quarter_of_each_model():
    known = mixed_fleet(128).cluster()
    counts = [sum(rank.device.name == name for rank in known.ranks) for name in DEVICES]
    assert counts == [32] * 4
    assert len(known.nodes) == 16
    assert len(mixed_fleet(16).cluster().ranks) == 16


@pytest.mark.parametrize("size", ["12", "0", "many"])
def test_sizes_that_are_no_nodes_are_refused(size, capsys):
    with pytest.raises(SystemExit):
        main(["--gpus", size])
    assert "--gpus" in capsys.readouterr().err
