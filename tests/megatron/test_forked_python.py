"""A forked Python ends, prints and is told as Python's own would be."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.megatron.forked import Forks
from tests.megatron.launch import environment

PROGRAMS = {
    "done": "print('said')",
    "code": "import sys; print('told', file=sys.stderr); sys.exit(3)",
    "words for a code": "import sys; sys.exit('because')",
    "exception": "raise ValueError('nobody expected this')",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "surroundings": "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['MARK'], sys.stdin.read())",
    "parent": "import os; print(os.getppid())",
    "at exit": "import atexit; atexit.register(print, 'parting')",
    "thread": "import threading; threading.Timer(0.1, print, ['late']).start()",
}


def ended(python: str | Path, words: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output, and the last line of standard error."""
    done = subprocess.run(
        [python, *words],
        cwd=folder,
        env=environment() | {"MARK": "a b"},
        input="typed",
        capture_output=True,
        text=True,
        timeout=200,  # the first waits for the imports
        check=False,
    )
    return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "-c") for name in PROGRAMS), ("surroundings", "-m"), ("surroundings", "script")],
)
def test_it_ends_as_python_does(name: str, way: str, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    words = {"-c": ["-c", PROGRAMS[name]], "-m": ["-m", "program"], "script": ["program.py"]}[way]
    found = ended(forks.python, [*words, "it's", "--flag"], tmp_path)
    assert found == ended(sys.executable, [*words, "it's", "--flag"], tmp_path)


def started(forks: Forks, code: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The program, and the process that it had forked."""
    script = f"import os, signal, time\n{code}\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    client = subprocess.Popen(
        [forks.python, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    return client, psutil.Process(int(client.stdout.readline()))


def test_what_is_started_inside_is_forked_too(forks: Forks, tmp_path: Path) -> None:
    inside = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', '{}']).returncode)"
    asked = 'import sys; sys.exit(5 if "megatron.core" in sys.modules else 6)'
    assert ended(forks.python, ["-c", inside.format(asked)], tmp_path)[0] == 5


def test_a_signal_reaches_the_process_and_its_end_the_caller(forks: Forks) -> None:
    client, process = started(forks, "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))")
    client.terminate()
    assert client.wait(20) == 7
    assert not process.is_running()


def test_the_process_ends_where_the_program_is_killed(forks: Forks) -> None:
    client, process = started(forks, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    client.kill()
    assert client.wait(20) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
