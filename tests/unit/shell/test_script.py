"""Scripts are read without running them: their words are bash's own, or are marked as unknown."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_hexi.argument_file import located_words, read_arguments_file
from megatron_hexi.errors import HexiError
from megatron_hexi.shell.script import Shell
from megatron_hexi.shell.training_start import find_training

#: Scripts whose last command shows what came before; `show` prints its words.
_KNOWN = {
    "variables": 'A=1 B="x $A"; A=2\nshow $A "$B" ${B} "${C:-d e}" ${C:-"d e"} ${D:=f} $D "a$"',
    "arrays": 'A=(a "b c" d)\nA+=(f)\nE=()\nshow "${A[@]}" ${A[@]} "x${A[@]}y" "${E[@]}" "${A[1]}" ${A[0]}',
    "joined": 'A=(1 0 1)\nB="[${A[*]}]"\nshow "$B" "${A[*]}" ${B[0]}',
    "sums": "N=3\nM=$((N + 2))\nshow $((N * 2 - 1)) $(( (M+1) % 4 )) $((7/N)) $(( $N*$M ))",
    "quotes": 'A=\'$x\'\nshow "$A" \'a"b\' "a\\"b" a\\ b "it\'s" ""',
    "joined lines": 'A=" --x 1 \\\n --y 2"\nshow $A \\\n  --z # no word',
    "heredocs": "cat <<EOF > /dev/null\nshow wrong $A\nEOF\nshow right",
    "pipelines": "A=2; true | cat && show $A 2>&1 | cat",
    "evaluated": 'C="show a b"\neval $C',
    "appended": 'A="--x"\nA+=" 1"\nexport B="$A"\nshow $B',
    "groups": "A=1\nif [ 1 = 2 ]; then :; fi\nwhile false; do :; done\nB=2\nshow $A $B",
}
#: Scripts with values that only a running shell knows.
_UNKNOWN = {
    "conditions": "A=1\nif true; then A=2; fi\nshow $A",
    "tests": "[ -n x ] && A=1\nshow $A",
    "alternatives": "A=1\nfalse || A=2\nshow $A",
    "cases": "M=b\ncase $M in\n a) X=1 ;;\n b|c) X=2 ;;\nesac\nshow $X",
    "functions": 'f() { X="$1"; }\nX=1\nf 2\nshow "$X"',
    "loops": "for x in a b; do A+=($x); done\nshow ${A[@]}",
    "counting": "N=1\n((N++))\nshow $N",
    "elements": "A=(1 2)\nA[1]=3\nshow ${A[1]}",
    "builtins": "A=1\nprintf -v A 2\nshow $A",
    "names": "A=$(basename /a/b)\nshow $A",
    "lengths": "A=abc\nshow ${#A} ${A:1} ${A/b/x}",
    "powers": "show $((2**3)) $((-7/2)) $((1<2))",
    "positional": "set -- a\nshow $1",
}


def _shown(text: str) -> tuple[Shell, list[str], list[str]]:
    """Return the reader of a script, the words of its last `show`, and what bash shows."""
    run = subprocess.run(
        ["bash", "-c", "show() { printf '%s\\0' \"$@\"; }\n" + text],
        capture_output=True,
        check=True,
        timeout=250,
    )
    shell = Shell()
    shell.read(text, Path("train.sh"))
    (command,) = [words for words in shell.commands if words[0].text == "show"]
    return shell, [word.text for word in command[1:]], run.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", _KNOWN)
def test_words_of_a_command_are_those_of_bash(name):
    _, read, shown = _shown(_KNOWN[name])
    assert read == shown


@pytest.mark.parametrize("name", _UNKNOWN)
def test_what_depends_on_a_run_is_never_given_a_value(name):
    shell, read, shown = _shown(_UNKNOWN[name])
    assert read
    assert shown
    assert all(shell.unknowns.found(word) for word in read)


def test_words_have_the_lines_they_stand_on(tmp_path):
    Path(tmp_path, "model.sh").write_text("MODEL=(\n  --num-layers 2\n)\n")
    script = tmp_path / "train.sh"
    script.write_text(
        'source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/model.sh"\nMORE="\n  --lr 1 \\\n  --bf16"\n'
        "torchrun x.py --micro-batch-size 1 \\\n  ${MODEL[@]} $MORE\n"
    )
    words = read_arguments_file(script.read_text(), script).words
    assert [(word.text, word.line, Path(word.file).name) for word in words] == [
        ("--micro-batch-size", 5, ""),
        ("1", 5, ""),
        ("--num-layers", 2, "model.sh"),
        ("2", 2, "model.sh"),
        ("--lr", 3, ""),
        ("1", 3, ""),
        ("--bf16", 4, ""),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "N=$(nproc)\ntorchrun x.py --micro-batch-size $N",
            "train.sh, line 1: $(nproc): only a running shell",
        ),
        ("torchrun x.py --micro-batch-size 1 --num-layers $1", "train.sh, line 1: $1: only a running shell"),
        (
            "if [ $(hostname) = a ]; then N=1; fi\ntorchrun x.py --micro-batch-size $N --lr $X",
            "train.sh, lines 1, 2: N=…, $X: only a running shell knows it",
        ),
        (
            ". ./env.sh\ntorchrun x.py --micro-batch-size $N",
            "$N: only a running shell knows it (./env.sh, which it reads, is not there); write the value",
        ),
        ("A=(1 2\n", "train.sh, line 1: A=(1: is not closed; close the parenthesis"),
        ("#!/bin/bash\nA='eval $A'\n" + "eval " * 60 + "x", "calls itself too often to be read"),
    ],
)
def test_what_only_a_running_shell_knows_is_refused_with_its_line(text, said):
    with pytest.raises(HexiError) as problem:
        located_words(text, Path("train.sh"))
    assert said in str(problem.value)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("torchrun --nnodes 2 pretrain_gpt.py --micro-batch-size 1", ("pretrain_gpt.py", 4)),
        ("srun -N2 python -u -m torch.distributed.run x.py --global-batch-size 8", ("x.py", 7)),
        ("ray job submit --address=x -- python3 train.py --rollout-batch-size 8", ("train.py", 7)),
        ("megatron sft --model m", ("megatron sft", 2)),
        ("python3 -m verl.trainer.main_ppo a=1", ("verl.trainer.main_ppo", 3)),
        ("torchrun convert.py --num-layers 2", None),
        ("python3 -c pass --micro-batch-size", None),
        ("ray start --head", None),
        ("megatron export --model m", None),
    ],
)
def test_starts_of_trainings_are_told_from_other_commands(command, found):
    assert find_training(command.split()) == found
