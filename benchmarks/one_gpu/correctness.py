"""The repository's tests that need a GPU, as a part of the benchmark."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.one_gpu.parts import Deadline, Row, Setting

#: Tests that train take the time of imports; several share the card.
_WORKERS = 5
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
        command += ["--collect-only", str(_TESTS)]
    else:
        command += ["-m", "gpu", "-k", "WithTe or transformer_engine", str(_TESTS)]
        if importlib.util.find_spec("xdist"):
            command += ["-n", str(_WORKERS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline.left_s, check=False)
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        raise RuntimeError(f"the tests did not end in time: {text[-2000:]}") from None
    if setting.is_dry:
        outcome = "passed" if done.returncode == 0 else "failed"
        yield {"collected": done.stdout.count("::"), "outcome": outcome}
        return
    if not report.exists():
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = problems[0].tag if problems else "passed"
        row: Row = {"test": case.get("name"), "outcome": outcome, "seconds": float(case.get("time") or 0)}
        if problems:
            row["why"] = (problems[0].get("message") or "")[:1500]
        yield row
