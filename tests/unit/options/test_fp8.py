"""A job in fp8 and its plan are checked against each other: recipes, units in bf16, rows."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import Mesh
from megatron_hexi.mesh.border import held_rows
from megatron_hexi.options.parser import parse_words
from megatron_hexi.options.plan_job import check_precision
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, Workload
from megatron_hexi.plan.terms import Fp8Recipe

#: A unit of two ranks in fp8 before one of one rank without it.
MIXED = Plan(
    Workload(100, 8, 8, 16, layers=2),
    (
        Replica(
            (
                Stage((Domain((Group(((0, 100),), (Member((0, 1), 100, (0, 4)),)),)),), layers=(0, 1)),
                Stage(
                    (Domain((Group(((0, 100),), (Member((2,), 100, (0, 8), precision="bf16"),)),)),),
                    layers=(1, 2),
                ),
            )
        ),
    ),
)


def job(**given: Any) -> Namespace:
    args = parse_words((), "job").args
    vars(args).update(given, hexi_plan="plan.yaml")
    return args


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fp8": "hybrid"}, None),
        ({}, r"plan.yaml: ranks \[2\] have precision: bf16, and the job is not in fp8; give --fp8-format"),
        (
            {"fp8": "hybrid", "hybrid_layer_pattern": "M*-C"},
            "--fp8-format: it is not tested with layers C, M; train",
        ),
    ],
)
def test_a_precision_belongs_to_a_job_in_fp8(given: dict[str, Any], says: str | None):
    with pytest.raises(PlanError, match=says) if says else nullcontext():
        check_precision(job(**given), MIXED)


@pytest.mark.parametrize(
    ("recipe", "sequence_parallel", "multiples", "rows"),
    [
        (None, True, (2, 1), (50, 100)),
        ("tensorwise", True, (32, 1), (64, 100)),
        ("delayed", False, (16, 1), (112, 100)),
        ("blockwise", True, (256, 1), (128, 100)),
        ("blockwise", False, (16, 1), (112, 100)),
        ("mxfp8", True, (64, 1), (64, 100)),
    ],
)
def test_units_in_fp8_alone_have_rows_in_multiples(
    recipe: Fp8Recipe | None, sequence_parallel: bool, multiples: tuple[int, int], rows: tuple[int, int]
):
    """The rows of a rank for 100 tokens, by hand."""
    mesh = Mesh(MIXED, 1, sequence_parallel, recipe)
    assert tuple(mesh.row_multiple(mesh.units[rank]) for rank in (1, 2)) == multiples
    assert tuple(held_rows(mesh, rank).rows for rank in (1, 2)) == rows
    assert sum(stop - start for rank in (0, 1) for start, stop in held_rows(mesh, rank).positions) in (
        100,
        200,
    )
