"""Stands in for torchrun, python, srun and mpirun while ``hexi capture`` runs a launch script.

The start of a training run is told to `hexi capture` as a line of JSON, and goes no further. Any other use of
python is passed on. The program that srun or mpirun is given runs once, here.

This file is run by its path, without this package.
"""

import json
import os
import shutil
import sys
import time

#: Programs that `hexi capture` puts this file in the place of.
NAMES = ("torchrun", "python", "python3", "srun", "mpirun", "mpiexec")
_SHELLS = ("bash", "sh")
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "megatron_hexi.torchrun")
#: Modules that run the script that follows.
_RUNNERS = (*_LAUNCHERS, "megatron_hexi.run")
#: An option that all of Megatron's training scripts have, and its tools do not.
_TRAINS = "--micro-batch-size"
#: Seconds in which `hexi capture` ends the script; it does at once.
_ENDED_S = 60.0


def main() -> None:
    """Report the start of a training run, or go on with the program that is meant."""
    name, words = os.path.basename(sys.argv[1]), sys.argv[2:]
    if name not in NAMES[:3]:
        _start_program(name, words)
    flags = {word.partition("=")[0] for word in words}
    launches = name == "torchrun" or (words[:1] == ["-m"] and words[1:2] and words[1] in _LAUNCHERS)
    if launches or _TRAINS in flags:
        _tell(name, words)
    _run(name, words)


def _tell(name: str, words: list[str]) -> None:
    """Send the training script and its arguments to `hexi capture`, and wait to be ended by it."""
    script, arguments = _training(words)
    message = {"program": name, "script": script, "arguments": arguments}
    with open(int(os.environ["HEXI_CAPTURE_PIPE"]), "w") as pipe:
        pipe.write(json.dumps(message) + "\n")
    time.sleep(_ENDED_S)
    sys.exit(1)


def _training(words: list[str]) -> tuple[str, list[str]]:
    """Return the script or module that words of torchrun or python start, and its arguments; "" if none."""
    for number, word in enumerate(words):
        module = words[number - 1] in ("-m", "--module") if number else False
        if word.endswith(".py") or (module and word not in _RUNNERS):
            return word, words[number + 1 :]
    return "", words


def _start_program(name: str, words: list[str]) -> None:
    """Run the program that srun or mpirun is given, found by its name."""
    for number, word in enumerate(words):
        program = os.path.basename(word)
        if program in NAMES or program in _SHELLS:
            os.execvp(program, [program, *words[number + 1 :]])
    print(f"hexi capture: {name}: starts no shell, python or torchrun", file=sys.stderr)
    sys.exit(1)


def _run(name: str, words: list[str]) -> None:
    """Run the program of this name that comes next on PATH."""
    own = os.environ["HEXI_CAPTURE_FOLDER"]
    path = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != own)
    program = shutil.which(name, path=path)
    if program is None:
        print(f"hexi capture: {name}: not found", file=sys.stderr)
        sys.exit(127)
    os.execv(program, [name, *words])


if __name__ == "__main__":
    main()
