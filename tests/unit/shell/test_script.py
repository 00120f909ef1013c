"""Scripts are read as bash runs them: the words of their commands, compared with bash's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_hexi.argument_file import located_words, read_arguments_file
from megatron_hexi.errors import HexiError
from megatron_hexi.shell.script import Shell
from megatron_hexi.shell.training_start import find_training

#: Scripts whose last command shows what came before; `show` prints its words.
_SCRIPTS = {
    "variables": 'A=1 B="x $A"; A=2\nshow $A "$B" ${B} "${C:-d e}" ${C:-"d e"} ${#B}',
    "arrays": 'A=(a "b c" $(echo d e))\nA+=(f)\nE=()\nshow "${A[@]}" ${A[@]} "x${A[@]}y" "${E[@]}" "${A[1]}"'
    " ${#A[@]}",
    "joined": 'A=(1 0 1)\nprintf -v B "[%s]" "$(IFS=", "; echo "${A[*]}")"\nshow "$B" "${A[*]}"',
    "integers": "N=3\n((N+=2))\nshow $((N * 2 - 1)) $((N>4 && N<9)) $(( (N+1) % 4 )) $((2**3))",
    "counting": "A=()\nfor ((i=0; i<4; i++)); do\n"
    " if (( i < 2 )); then A+=(0); else A+=(1); fi\ndone\nshow ${A[@]}",
    "walking": "for x in a b; do for y in 1 2; do A+=($x$y); done; done\nshow ${A[@]}",
    "conditions": 'M=moe\nif [ "$M" = moe ] && [[ $M != dense ]]; then X=1; '
    "elif true; then X=2; else X=3; fi\n"
    '[ -n "$M" ] && Y=1 || Y=2\n[[ $M == d* ]] || Z=3\nshow $X $Y $Z',
    "cases": "M=b\ncase $M in\n a) X=1 ;;\n b|c) X=2 ;;\n *) X=3 ;;\nesac\nshow $X",
    "functions": 'f() { X="$1-$2"; }\nf a "b c"\nshow "$X"',
    "quotes": 'A=\'$x\'\nshow "$A" \'a"b\' "a\\"b" a\\ b "it\'s" ""',
    "joined lines": 'A=" --x 1 \\\n --y 2"\nshow $A \\\n  --z # no word',
    "heredocs": "cat <<EOF > /dev/null\nshow wrong $A\nEOF\nshow right",
    "names": 'P=/a/b.sh\nshow "$(dirname "$P")" $(basename $P .sh) $(seq 1 3)',
    "pipelines": "true | cat; false || A=1; show $A 2>&1 | cat",
    "evaluated": 'C="show a b"\neval $C',
}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_words_of_a_command_are_those_of_bash(name):
    text = _SCRIPTS[name]
    shown = "show() { printf '%s\\0' \"$@\"; }\n" + text
    run = subprocess.run(["bash", "-c", shown], capture_output=True, check=True, timeout=60)
    shell = Shell()
    shell.read(text, Path("train.sh"))
    commands = [command.words for command in shell.commands if command.words[0].text == "show"]
    assert [word.text for word in commands[-1][1:]] == run.stdout.decode().split("\0")[:-1]
    assert len(commands) == 1


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
            "train.sh, lines 1, 2: N=… (in an if), $X: only a running shell knows it",
        ),
        ("A=(1 2\n", "train.sh, line 1: A=(: is not closed; close the parenthesis"),
        ("#!/bin/bash\nf() { f; }\nf\n", "calls itself too often to be read"),
        ("#!/bin/bash\nfor ((i=0; i<9; i+=0)); do :; done\n", "loops too long to be read"),
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
