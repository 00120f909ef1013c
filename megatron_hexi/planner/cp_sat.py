"""The CP-SAT solver as the planner uses it: the same model always gets the same solution."""

from __future__ import annotations

from ortools.sat.python import cp_model

#: The seed of every solver, which plans record.
SEED = 1


def repeatable_solver(effort: float) -> cp_model.CpSolver:
    """Return a solver with one worker, a fixed seed, and a limit of its work rather than of its seconds.

    Args:
        effort: the most deterministic time of a solution, roughly seconds.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_deterministic_time = effort
    # OR-Tools 9.15's search for symmetries ends the process at some models with two constraints on the same
    # sum ("Check failed: context_->VarToConstraints(var).empty()"). Models this small gain nothing by it.
    solver.parameters.symmetry_level = 0
    return solver
