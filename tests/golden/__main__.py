"""`python -m tests.golden`: compare with the golden values, or write them with `--write`.

Compared by part: `plans` and `trainings` bit by bit, `timings` and `planner` with floats within 1e-12 of each
other. Names given behind the options pick the cases whose names begin with one of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tests.golden import values

#: Golden values of a part, case by case.
type Cases = Iterator[tuple[str, Callable[[], Any]]]


def _plans() -> Cases:
    from tests.golden import plans

    for name, plan in plans.cases():
        yield name, partial(plans.digests, plan)


def _timings() -> Cases:
    from tests.golden import timings

    for name, case in timings.cases():
        yield name, partial(timings.values, case)
    for name, rows in timings.published():
        yield name, partial(dict, rows)


def _planner() -> Cases:
    from tests.golden import planner

    for name, asked in planner.cases():
        yield name, partial(planner.values, *asked)


def _trainings() -> Cases:
    from tests.golden import trainings
    from tests.megatron.forked import Forks

    with Forks() as forks:
        for name, case in trainings.cases():
            yield name, partial(trainings.values, case, forks)


#: By name: the cases, and the relative difference that two floats may have.
PARTS: dict[str, tuple[Callable[[], Cases], float]] = {
    "plans": (_plans, 0.0),
    "timings": (_timings, 1e-12),
    "planner": (_planner, 1e-12),
    "trainings": (_trainings, 0.0),
}


def main(words: Sequence[str] | None = None) -> int:
    """Compare or write; 1 if a value differs.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the values instead of comparing them")
    parser.add_argument("cases", nargs="*", help="only cases whose names begin with one of these")
    options = parser.parse_args(words)
    differing = 0
    for part in options.part or PARTS:
        differing += _run(part, tuple(options.cases), write=options.write)
    return min(differing, 1)


def _run(part: str, names: tuple[str, ...], *, write: bool) -> int:
    """Compare or write a part; how many of its cases differ."""
    make, relative = PARTS[part]
    golden = values.read(part)
    found, differing = {}, 0
    for name, value in make():
        if names and not name.startswith(names):
            continue
        found[name] = value()
        if write:
            continue
        lines = list(values.differences(golden.get(name), found[name], relative))
        differing += bool(lines)
        for line in lines[:5]:
            print(f"{part}, {name}{line}", flush=True)
    if write:
        values.write(part, {**golden, **found} if names else found)
    missing = 0 if names or write else len(golden.keys() - found.keys())
    print(f"{part}: {len(found)} cases, {differing} differ{f', {missing} are gone' if missing else ''}")
    return differing + missing


if __name__ == "__main__":
    sys.exit(main())
