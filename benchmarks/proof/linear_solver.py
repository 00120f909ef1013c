"""A linear program of dense columns, solved by GLOP."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from ortools.linear_solver import pywraplp
from ortools.linear_solver.linear_solver_pb2 import MPSOLVER_OPTIMAL, MPModelRequest, MPSolutionResponse

from megatron_hexi.cost.arrays import Floats

#: Smaller coefficients are dropped: they only make the program unstable.
_SMALL = 1e-9
#: GLOP's parameters, tried in turn. Preprocessing takes longer than solving so few columns, but helps where
#: GLOP gives up.
_WAYS = "use_preprocessing: false", "use_preprocessing: true"


class Solved(NamedTuple):
    """The largest total worth of the columns, and the price (dual value) of each row, at least 0."""

    worth: float
    prices: Floats


def solve(columns: Floats, worths: Floats, least: Floats) -> Solved | None:
    """Maximise the total worth of columns, each used at least 0 times; ``None``: GLOP gave up.

    Args:
        columns: coefficient of each column in each row, [rows, columns].
        worths: worth of each column used once, [columns].
        least: lower bounds of the first rows, [first rows]; the other rows are at most 1.
    """
    request = MPModelRequest(solver_type=MPModelRequest.GLOP_LINEAR_PROGRAMMING)
    request.model.maximize = True
    for worth in worths.tolist():
        request.model.variable.add(lower_bound=0, objective_coefficient=worth)
    at, of = np.nonzero(np.abs(columns) > _SMALL)
    spans = np.searchsorted(at, range(len(columns) + 1)).tolist()
    numbers, values = of.tolist(), columns[at, of].tolist()
    bounds = [{"lower_bound": value} for value in least.tolist()]
    bounds += [{"upper_bound": 1.0}] * (len(columns) - len(least))
    for bound, (start, end) in zip(bounds, itertools.pairwise(spans), strict=True):
        request.model.constraint.add(var_index=numbers[start:end], coefficient=values[start:end], **bound)
    response = MPSolutionResponse()
    for way in _WAYS:
        request.solver_specific_parameters = way
        pywraplp.Solver.SolveWithProto(request, response)
        if response.status == MPSOLVER_OPTIMAL:
            return Solved(response.objective_value, np.abs(response.dual_value))
    return None
