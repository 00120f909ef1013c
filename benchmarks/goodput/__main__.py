"""`python -m benchmarks.goodput` measures what failures cost a job, and writes docs/results/goodput.md.

One job of Megatron is trained three times, on three nodes of this machine whose GPUs are emulated (paced
CPUs): undisturbed under torchrun; under `megatron_hexi.elastic`, with a failure of a random kind at a random
moment every so often; and under torchrun, which restarts from checkpoints, with the same failures. Half an
hour with the defaults, a very sick job; 40 minutes with `--ordinary`. Needs Linux, and a machine that does
nothing else meanwhile. Results are kept in goodput.json and goodput-ordinary.json beside the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.goodput.agents import LOST_AFTER_S
from benchmarks.goodput.failures import draw_failures
from benchmarks.goodput.job import BATCH, SAVE_INTERVAL, make_job
from benchmarks.goodput.page import write_page
from benchmarks.goodput.predict import predict_run, predict_week
from benchmarks.goodput.results import FILES, Goodput, Settings, Trial, read_result, result_text
from benchmarks.goodput.trial import TrialFailedError, run_trial
from megatron_hexi.lab.testbed.isolation import raise_priority
from megatron_hexi.text_file import write_text_atomically

_EXAMPLE = """\
Examples; a quick look that writes no page:
  python -m benchmarks.goodput --iterations 60 --every 20 --speed 4 --seed 7 --json
fifty failures by ten seeds:
  python -m benchmarks.goodput --seeds 10 --iterations 66 --every 12 --speed 8 --repair 5
"""


#: 30 s an iteration, and a failure every ten minutes.
_ORDINARY = {"iterations": 60, "every": 20, "speed": 0.07, "copy_interval": 1}


def main(words: list[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.

    Returns:
        0, or 1 where a job failed, a loss differs, or a sample was not consumed once.
    """
    options = _parse(words)
    try:
        if options.page:
            for name in FILES.values():
                if (options.output / name).exists():
                    _write(read_result(options.output / name, Goodput), options.output)
            return 0
        raise_priority()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # agents are ended on the way
        folder = options.logs or Path(tempfile.mkdtemp(prefix="hexi-goodput-"))
        folder.mkdir(parents=True, exist_ok=True)
        _say(f"logs in {folder}")
        measuring = _Measuring(options, folder)
        if options.seeds is not None:
            return _survive(measuring, range(options.seed, options.seed + options.seeds))
        goodput = _compare(measuring, options.seed, at_once=3 if options.ordinary else 1)
        if options.json:
            print(result_text(goodput), end="")
        else:
            _write(goodput, options.output)
    except (TrialFailedError, subprocess.CalledProcessError, OSError, ValueError) as problem:
        _say(str(problem))
        return 1
    wrong = goodput.problems()
    for line in wrong:
        _say(line)
    return 1 if wrong else 0


def _write(goodput: Goodput, folder: Path) -> None:
    """Write results and page, and both again with what is predicted of them, which takes minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_files(goodput, folder)
    run, week = predict_run(goodput), predict_week()
    _write_files(dataclasses.replace(goodput, predicted_run=run, predicted_week=week), folder)


def _write_files(goodput: Goodput, folder: Path) -> None:
    write_text_atomically(folder / FILES[goodput.settings.job], result_text(goodput))
    paths = (folder / name for name in FILES.values())
    write_page([read_result(path, Goodput) for path in paths if path.exists()], folder)


class _Measuring:
    """One job, and its trials.

    Args:
        options: the command line's.
        folder: for files and logs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        kept, settings = folder / "settings.json", self.settings()
        if kept.exists():
            earlier = dataclasses.replace(read_result(kept, Settings), date=settings.date)
            if earlier != settings:
                raise TrialFailedError(f"--logs {folder}: has trials of other settings; give another folder")
        write_text_atomically(kept, result_text(settings))
        self._job = make_job(folder, options.iterations, options.speed, options.copy_interval)

    def settings(self) -> Settings:
        """Return the settings, and where it runs."""
        options = self._options
        return Settings(
            job="ordinary" if options.ordinary else "sick",
            iterations=options.iterations,
            every=options.every,
            seed=options.seed,
            batch=BATCH,
            repair_s=options.repair,
            speed=options.speed,
            save_interval=SAVE_INTERVAL,
            copy_interval=options.copy_interval,
            lost_after_s=LOST_AFTER_S,
            machine=_machine(),
            date=datetime.date.today().isoformat(),
        )

    def trial(self, name: str, *, is_elastic: bool, seed: int | None) -> Trial:
        """Run a trial with the failures of a seed (``None``: undisturbed), unless an earlier run has."""
        options, kept = self._options, self._folder / f"{name}.json"
        if kept.exists():
            _say(f"{name}: from {kept}")
            return read_result(kept, Trial)
        shutil.rmtree(self._folder / name, ignore_errors=True)  # of a run that was ended
        _say(name)
        done = run_trial(
            self._job,
            self._folder / name,
            [] if seed is None else draw_failures(options.iterations, options.every, seed),
            is_elastic=is_elastic,
            iterations=options.iterations,
            repair_s=options.repair,
            say=lambda text: _say(f"{name}: {text}"),
        )
        write_text_atomically(kept, result_text(done))
        _say(f"{name}: {done.wall_s:.0f} s")
        return done

    def undisturbed(self) -> Trial:
        """Run the job without failures."""
        return self.trial("undisturbed", is_elastic=False, seed=None)


def _compare(measuring: _Measuring, seed: int, at_once: int) -> Goodput:
    with ThreadPoolExecutor(at_once) as pool:
        trials = (
            pool.submit(measuring.undisturbed),
            pool.submit(measuring.trial, "elastic", is_elastic=True, seed=seed),
            pool.submit(measuring.trial, "restarted", is_elastic=False, seed=seed),
        )
        undisturbed, elastic, restarted = (trial.result() for trial in trials)
    return Goodput(measuring.settings(), undisturbed, elastic, restarted)


def _survive(measuring: _Measuring, seeds: Iterable[int]) -> int:
    """Run the elastic job once for each seed, and count the failures that it outlives."""
    still, settings = measuring.undisturbed(), measuring.settings()
    outlived = problems = 0
    regained: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        trial = measuring.trial(f"seed-{seed}", is_elastic=True, seed=seed)
        found = [*trial.problems(still, settings), *trial.sample_problems(settings)]
        outlived, problems = outlived + len(trial.blows), problems + len(found)
        told = "; ".join(found) or f"losses within {trial.worst_loss(still):.1e}"
        print(f"seed {seed}: {len(trial.blows)} failures, {outlived} by now; {told}", flush=True)
        for blow, seconds in zip(trial.blows, trial.regained_s(), strict=True):
            regained[blow.kind].append(seconds)
    for kind, took in regained.items():
        print(
            f"{kind}: {len(took)} failures; until the next new iteration had ended {median(took):.1f} s in "
            f"the median, {max(took):.1f} s at most"
        )
    return 1 if problems else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _machine() -> dict[str, str]:
    names = ("torch", "megatron-core")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"cores": str(os.cpu_count()), "cpu": cpu, "python": platform.python_version(), **versions}


def _above_0(text: str) -> int:
    """Parse a whole number above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0; give for example 30")
    return int(text)


def _parse(words: list[str] | None) -> argparse.Namespace:
    """Return the options; those of an ordinary job are defaults beside `--ordinary`."""
    parser = _parser()
    if parser.parse_args(words).ordinary:
        parser.set_defaults(**_ORDINARY)
    return parser.parse_args(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput",
        description=(__doc__ or "").split("\n\n", 1)[1],
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ordinary",
        action="store_true",
        help="a job of 30 s an iteration and a failure every ten minutes, which has defaults of its own",
    )
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of the failures (default %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="run the elastic job alone, once for each of N seeds from --seed on, and count the failures "
        "that it outlives",
    )
    parser.add_argument(
        "--every",
        type=_above_0,
        default=30,
        metavar="N",
        help="iterations between failures (default %(default)s)",
    )
    parser.add_argument(
        "--repair",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="after which a killed node comes back (default %(default)s)",
    )
    parser.add_argument(
        "--copy-interval",
        type=_above_0,
        default=2,
        metavar="N",
        help="iterations between copies in memory (default %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="of the emulated GPUs: at 1 an iteration takes two seconds (default %(default)s)",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="PATH",
        help="a folder for logs and trials; those that have ended are taken from there (default: a new one)",
    )
    parser.add_argument("--page", action="store_true", help="run no job: predict and write the page again")
    parser.add_argument("--json", action="store_true", help="print the results, and write no page")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("docs/results"),
        metavar="PATH",
        help="folder of the page (default %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
