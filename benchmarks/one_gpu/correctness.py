"""The repository's tests that need a GPU, as a part of the benchmark."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.one_gpu.parts import Deadline, Row, Setting

#: Tests that train take the time of imports; several share the card, of four ranks each.
_WORKERS = 3
#: Seconds that pytest has to end when interrupted.
_PARTING_S = 10
_TESTS = Path("tests/megatron/test_gpu_training.py")


def run(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    """Run the tests that train, those with Transformer Engine first where it is installed.

    Yields:
        Each test with its outcome and its seconds.

    Raises:
        RuntimeError: pytest itself failed.
    """
    report = setting.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if setting.is_dry:
        command += ["--collect-only", str(_TESTS / "distributed")]
    else:
        command += ["-m", "gpu", "-k", "WithTe or transformer_engine", str(_TESTS)]
        if importlib.util.find_spec("xdist"):
            command += ["-n", str(_WORKERS)]
    done = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = done.communicate(timeout=deadline.left_s)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGINT)  # it ends its workers, and reports the tests that have run
        try:
            said, _ = done.communicate(timeout=_PARTING_S)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            said, _ = done.communicate()
        yield {"test": "all", "outcome": "failed", "why": "not all ended in time"}
    if setting.is_dry:
        outcome = "passed" if done.returncode == 0 else "failed"
        yield {"collected": said.count("::"), "outcome": outcome}
        return
    if not report.exists():
        raise RuntimeError(said[-3000:])
    for case in ElementTree.parse(report).iter("testcase"):
        if case.get("name") is None:  # it was interrupted
            continue
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = problems[0].tag if problems else "passed"
        row: Row = {"test": case.get("name"), "outcome": outcome, "seconds": float(case.get("time") or 0)}
        if problems:
            row["why"] = (problems[0].get("message") or "")[:1500]
        yield row
