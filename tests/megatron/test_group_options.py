"""The plan's groups get what Megatron gives to its own."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron import groups
from megatron_hexi.megatron.process_groups import GroupOptions


@pytest.fixture
def made(monkeypatch):
    """What torch is asked for, in place of making a group."""
    from megatron.core import parallel_state

    asked = []

    def new_group(**kwargs):
        asked.append(kwargs)
        return dist.ProcessGroup.__new__(dist.ProcessGroup)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(parallel_state, "_global_process_group_list", [None])
    return asked


def options(**given) -> GroupOptions:
    from megatron.core.parallel_state import initialize_model_parallel

    call = inspect.signature(initialize_model_parallel).bind(**given)
    call.apply_defaults()
    return GroupOptions.of_call(call.arguments)


def test_the_time_out_is_the_jobs_also_when_it_changes_later(made):
    from megatron.core import parallel_state

    group = options(distributed_timeout_minutes=7).make([2, 3], "HEXI_A2A_GROUP")
    assert made[0]["timeout"] == timedelta(minutes=7)
    assert made[0]["pg_options"] is None
    # Megatron sets the time-out after initialisation on all groups of this list.
    assert parallel_state._global_process_group_list == [None, group]


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="torch without NCCL")
def test_streams_and_communicators_are_those_of_context_parallelism(made, tmp_path):
    path = tmp_path / "nccl.yaml"
    path.write_text("cp: {max_ctas: 8}\ndp: {max_ctas: 4}\n")
    given = options(nccl_communicator_config_path=str(path), high_priority_stream_groups=["cp", "dp_cp"])
    given.make([1, 2], "HEXI_DOMAIN_GROUP")
    assert made[0]["pg_options"].is_high_priority_stream
    assert made[0]["pg_options"].config.max_ctas == 8
    assert made[0]["group_desc"] == "HEXI_DOMAIN_GROUP"


def test_a_default_group_bound_to_a_device_is_refused_by_name(monkeypatch):
    class Bound:
        bound_device_id = torch.device("cuda", 1)

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", Bound)
    with pytest.raises(PlanError, match=r"bound to the device cuda:1.*without device_id"):
        groups._refuse_bound_device()
