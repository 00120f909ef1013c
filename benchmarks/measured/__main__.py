"""`python -m benchmarks.measured`: trains on emulated clusters and writes docs/results/measured.md.

Needs Linux with root or user namespaces, and a machine that does nothing else meanwhile; about ten
minutes a scenario. Results are kept in measured.json beside the page; with --only, other scenarios keep
theirs, and with --page nothing is run at all.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path

from benchmarks.measured.launch import RunFailed
from benchmarks.measured.measure import measure
from benchmarks.measured.page import findings, write_page
from benchmarks.measured.results import read_results, results_text
from benchmarks.measured.scenarios import SCENARIOS
from megatron_hexi.text_file import write_text_atomically


def main(words: list[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.

    Returns:
        0, 1 where a scenario failed, or 2 where none has the name.
    """
    options = _parser().parse_args(words)
    chosen = [scenario for scenario in SCENARIOS if fnmatch.fnmatch(scenario.name, options.only)]
    if not chosen:
        print(
            f"--only {options.only}: no such scenario; there are {', '.join(s.name for s in SCENARIOS)}",
            file=sys.stderr,
        )
        return 2
    file = options.output / "measured.json"
    options.output.mkdir(parents=True, exist_ok=True)
    results, failed = read_results(file), False
    logs = options.logs or Path(tempfile.mkdtemp(prefix="hexi-measured-"))
    for scenario in () if options.page else chosen:
        name = scenario.name
        print(f"{name}: logs in {logs / name}", file=sys.stderr)
        try:
            results[name] = measure(
                scenario,
                logs / name,
                rounds=options.rounds,
                iterations=options.iterations,
                probed=options.cluster,
                say=lambda text, name=name: print(f"{name}: {text}", file=sys.stderr, flush=True),  # type: ignore[misc]
            )
        except RunFailed as problem:
            print(f"{name}: {problem}", file=sys.stderr)
            failed = True
            continue
        write_text_atomically(file, results_text(results))
    results = {one.name: results[one.name] for one in SCENARIOS if one.name in results}
    write_page(results, options.output)
    for line in findings(results):
        print(line)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__)
    parser.add_argument("--only", default="*", metavar="GLOB", help="scenarios to run")
    parser.add_argument("--page", action="store_true", help="run nothing: write page and pictures again")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each layout (default %(default)s)")
    parser.add_argument("--iterations", type=int, default=3, help="timed in each (default %(default)s)")
    parser.add_argument("--cluster", type=Path, help="the file of an earlier probe, in place of a new one")
    parser.add_argument("--logs", type=Path, help="a folder for logs (default: a temporary one)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("docs/results"), help="folder (default %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
