"""`python -m benchmarks.rivals`: HexiScale's and Zorse's planners by their authors' rules.

All of it is prediction. With --page it writes docs/results/rivals.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rivals.cases import hexiscale_cases, zorse_cells, zorse_example, zorse_view
from benchmarks.rivals.plans import hexiscale_plan, zorse_plan
from benchmarks.rivals.readings import PUBLISHED
from benchmarks.rivals.readings.staged import StagedJudge
from benchmarks.rivals.zorse import choose
from megatron_hexi.cluster import Cluster
from megatron_hexi.planner import Request
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.text_file import write_text_atomically

PAGE = Path(__file__).parents[2] / "docs" / "results" / "rivals.md"
WORDS = Path(__file__).parent / "words.md"


def page() -> str:
    """Return docs/results/rivals.md."""
    return WORDS.read_text().format(
        hexiscale="\n".join(_hexiscale_rows()), zorse="\n".join(_zorse_rows()), example=_example()
    )


def _hexiscale_rows() -> Iterator[str]:
    for case in hexiscale_cases():
        size = case.training.micro // case.training.pipelines
        here = case.scheduler.choose()
        cells = [
            case.name,
            f"{case.seconds:.3f}",
            f"{case.scheduler.seconds(case.chosen):.3f}",
            "-" if here is None else f"{here.seconds:.3f}",
            _spelled(hexiscale_plan(case.cluster, case.job, case.chosen, size)),
            _spelled(here and hexiscale_plan(case.cluster, case.job, here.pipelines, size)),
            _reading("hexiscale", Request(case.job), case.cluster),
        ]
        yield f"| {' | '.join(cells)} |"


def _zorse_rows() -> Iterator[str]:
    for name, request, cluster in zorse_cells():
        choice = choose(*zorse_view(request, cluster))
        stages = "-"
        if choice is not None:
            stages = ", ".join(str(len(group)) for group in choice.groups)
        cells = [
            name,
            stages,
            "-" if choice is None else f"{choice.milliseconds / 1e3:.4g}",
            _spelled(choice and zorse_plan(cluster, request.job, choice)),
            _reading("zorse", request, cluster),
        ]
        yield f"| {' | '.join(cells)} |"


def _example() -> str:
    machines, training, times, told = zorse_example()
    found = choose(machines, training, times)
    if found is None:
        return "no choice"
    (counts,) = found.micro_batches
    shares = ", ".join(map(str, counts[:-1]))
    is_same = found[:4] == told[:4] and abs(found.milliseconds - told.milliseconds) < 1e-3
    same = "the same choice, to a microsecond" if is_same else "another choice"
    return (
        f"{same}: micro-batches of {found.size}, of which the GPUs take {shares} and {counts[-1]}, and "
        f"{found.milliseconds:,.3f} ms"
    )


def _reading(name: str, request: Request, cluster: Cluster) -> str:
    return _spelled(PUBLISHED[name](StagedJudge(request, cluster)))


def _spelled(found: Candidate | None) -> str:
    if found is None:
        return "-"
    return f"{found.iteration_s:.4g}" + ("" if found.fits else " (does not fit)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it.

    Args:
        arguments: the command line's; ``None``: the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals",
        description=__doc__,
        epilog="Example: python -m benchmarks.rivals --page",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--page", action="store_true", help="write docs/results/rivals.md")
    writes = parser.parse_args(arguments).page
    text = page()
    if writes:
        write_text_atomically(PAGE, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
