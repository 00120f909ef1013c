"""Stands in for torchrun, python, srun, ray and others while ``hexi`` runs a launch script.

For `hexi plan` and `hexi capture` a start of a training is told as a line of JSON, and goes no further. For
`hexi launch` it goes on with a plan. Any other use of python is passed on. The program that srun or mpirun is
given runs once, here. What would stop other processes does nothing.

This file is run by its path, without this package.
"""

import json
import os
import re
import shutil
import sys
import time

#: Programs that start trainings, and those that start them on several nodes.
PROGRAMS = ("torchrun", "python", "python3", "ray", "megatron")
SPREADERS = ("srun", "mpirun", "mpiexec")
#: Programs that do nothing beside a training that is not started: they stop other processes, or go elsewhere.
SILENT = ("pkill", "killall", "ssh", "scp", "pdsh", "pdcp")
_SHELLS = ("bash", "sh")
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "megatron_hexi.torchrun")
_OWN = "megatron_hexi.run"
#: Modules that run the script that follows.
_RUNNERS = (*_LAUNCHERS, _OWN)
#: Options that all trainings of Megatron or of slime have, and their tools do not.
_TRAINS = frozenset(("--micro-batch-size", "--global-batch-size", "--rollout-batch-size"))
_SWIFT = ("sft", "pt", "rlhf")
#: Seconds in which `hexi` ends the script; it does at once.
_ENDED_S = 60.0


def find_training(words: list[str]) -> tuple[str, int] | None:
    """Return what a command trains with, and the number of its first argument, if any.

    Of a script or module it is its name, of ms-swift's command line ``megatron sft``.
    """
    for number, word in enumerate(words):
        name, behind = os.path.basename(word), words[number + 1 :]
        if name == "ray":
            start = (
                number + 2 + behind.index("--")
                if behind[:2] == ["job", "submit"] and "--" in behind
                else None
            )
            inner = None if start is None else find_training(words[start:])
            return None if start is None or inner is None else (inner[0], start + inner[1])
        if name == "megatron":
            return (f"{name} {behind[0]}", number + 2) if behind and behind[0] in _SWIFT else None
        if name in PROGRAMS:
            return _script(words, number)
    return None


def _script(words: list[str], program: int) -> tuple[str, int] | None:
    """Return the script or module that torchrun or python trains with, and where its arguments begin."""
    launches = os.path.basename(words[program]) == "torchrun"
    for number in range(program + 1, len(words)):
        word, is_module = words[number], words[number - 1] in ("-m", "--module")
        if is_module and word in _RUNNERS:
            launches = launches or word in _LAUNCHERS
        elif is_module or word.endswith(".py"):
            flags = {argument.partition("=")[0] for argument in words[number + 1 :]}
            trains = flags & _TRAINS or word.startswith("verl.") or (launches and not flags)
            return (word, number + 1) if trains else None
        elif word == "-c":
            return None
    return ("", program + 1) if launches else None


def main() -> None:
    """Tell of the start of a training or carry it out, or go on with the program that is meant."""
    name, words = os.path.basename(sys.argv[1]), sys.argv[2:]
    if name in SILENT:
        sys.exit(0)
    found = find_training([name, *words])
    plan = os.environ.get("HEXI_START_WORDS")
    if plan is not None and found is not None:
        _run(name, _with_plan(words, found[0], found[1] - 1, json.loads(plan)))
    if plan is not None and name in SPREADERS and _starts_in_shell(words):
        print(
            f"hexi launch: {name}: the training that its shell starts cannot be given the plan; let {name} "
            "start torchrun or python itself, or put -m megatron_hexi.run and --hexi-plan into its words",
            file=sys.stderr,
        )
        sys.exit(2)
    if plan is None and name in SPREADERS:
        _start_program(name, words)
    if plan is None and found is not None:
        _tell(name, found[0], words[found[1] - 1 :])
    if plan is None and name == "ray":
        sys.exit(0)
    _run(name, words)


def _tell(name: str, script: str, arguments: list[str]) -> None:
    """Send the training script and its arguments to `hexi`, and wait to be ended by it."""
    message = {"program": name, "script": script, "arguments": arguments}
    with open(int(os.environ["HEXI_START_PIPE"]), "w") as pipe:
        pipe.write(json.dumps(message) + "\n")
    time.sleep(_ENDED_S)
    sys.exit(1)


def _with_plan(words: list[str], script: str, first: int, instead: dict[str, list[str]]) -> list[str]:
    """Return the words of a start under a plan: our entry before the script, and the plan's arguments."""
    before, remaining, leaving = words[: first - 1], [], False
    if not script.endswith(".py") and not script.startswith("megatron_hexi."):
        print(f"hexi launch: {script}: its own training loop knows no plan", file=sys.stderr)
        sys.exit(2)
    for word in words[first:]:
        if word.startswith("--"):
            leaving = word.partition("=")[0] in instead["drop"]
        if not leaving:
            remaining.append(word)
    entry = [script]
    if script.endswith(".py") and before[-1:] != [_OWN]:
        entry = ["-m", _OWN, script]
    return [*before, *entry, *instead["first"], *remaining, *instead["add"]]


def _start_program(name: str, words: list[str]) -> None:
    """Run the program that srun or mpirun is given, found by its name."""
    for number, word in enumerate(words):
        program = os.path.basename(word)
        if program in PROGRAMS or program in _SHELLS:
            os.execvp(program, [program, *words[number + 1 :]])
    print(f"hexi: {name}: starts no shell, python or torchrun", file=sys.stderr)
    sys.exit(1)


def _starts_in_shell(words: list[str]) -> bool:
    """Whether a shell is given words, or a script, that name a program which starts trainings.

    Under srun it runs on other nodes, where no stand-ins are.
    """
    for number, word in enumerate(words[:-1]):
        if os.path.basename(word) in _SHELLS:
            text = words[-1] if words[number + 1].startswith("-") else words[number + 1]
            if os.path.isfile(text):
                with open(text, errors="replace") as script:
                    text = script.read()
            return "--hexi-plan" not in text and re.search(rf"\b({'|'.join(PROGRAMS)})\b", text) is not None
    return False


def _run(name: str, words: list[str]) -> None:
    """Run the program of this name that comes next on PATH."""
    own = os.environ["HEXI_START_FOLDER"]
    path = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != own)
    program = shutil.which(name, path=path)
    if program is None:
        print(f"hexi: {name}: not found", file=sys.stderr)
        sys.exit(127)
    os.execv(program, [name, *words])


if __name__ == "__main__":
    main()
