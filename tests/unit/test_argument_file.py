"""Files of arguments: split as bash splits them, but for what bash fills in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.argument_file import last_value, read_arguments_file, read_words, split_words
from megatron_hexi.errors import HexiError
from megatron_hexi.shell.words import Word
from tests.support.plans import examples

PATH = Path("job.args")

#: Pieces of text. No variables, no operators and no patterns: those are bash's own.
_PIECES = st.sampled_from(
    [
        *("a", "b", "=", "/", ".", ":", "#", "-", "ä", "--save", " ", "  ", "\t", "\n"),
        *("\\\n", "\\#", "\\ ", "\\'", '\\"', "\\\\", "'a b'", "'#'", "'a\"b'", "''"),
        *('"a b"', '"a # b"', '"it\'s"', '"a\\"b"', '"a\\\\b"', '""'),
        *(" # a comment\n", "\n# it's one\n", "# an odd one \\\n"),
    ]
)


@examples(200)
@given(st.lists(_PIECES, max_size=30).map("".join))
def test_words_are_those_of_bash(text):
    # Between words, so that a backslash at the end of a line is one; bash would join the halves of a word.
    # After an option: without any, a word before a colon makes the file YAML, which is refused.
    text = "--lr " + text.replace("\\\n", " \\\n ")
    script = f"words=(\n{text}\n)\nprintf '%s\\0' \"${{words[@]}}\""
    run = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=250)
    found = split_words(text + "\n", PATH)
    assert found == (run.stdout.decode().split("\0")[:-1] if found else [])


def test_the_file_of_the_documentation():
    text = """\
--save /data/my runs            # two words: a blank separates
--save '/data/my runs'          # one
--title "run #3" --tag a#b      # a # inside a word is itself
--lr \\
  1e-3
"""
    assert split_words(text, PATH) == [
        *("--save", "/data/my", "runs", "--save", "/data/my runs"),
        *("--title", "run #3", "--tag", "a#b", "--lr", "1e-3"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--lr 1\n--save 'a\n--load b", "job.args, line 2: 'a: is not closed; close the quotes"),
        ('--save "a', 'job.args, line 1: "a: is not closed'),
        ("--save a\\", "job.args, line 1: \\: is not closed"),
        ("\n--save $RUNS/a", "job.args, line 2: $RUNS/a: variables are not filled in; write the value"),
        ('--save "${RUNS}"', "variables are not filled in"),
        ("--save `pwd`", "variables are not filled in"),
        ("--save $(pwd)", "variables are not filled in"),
        ("--save a\0b", "job.args, line 1: a NUL byte"),
    ],
)
def test_what_a_shell_would_not_take_or_fill_in_is_refused(text, said):
    with pytest.raises(HexiError, match=re.escape(said)):
        split_words(text, PATH)


def test_all_variables_are_named_at_once():
    with pytest.raises(HexiError, match=r"^job\.args, lines 1, 3: \$A, \$B/c: variables are not"):
        split_words("--save $A\n--lr 1\n--load $B/c", PATH)


def test_a_variable_with_a_literal_default_is_read_as_it():
    text = "--rotary-base \"${BASE:-1000000}\"\n--lr ${LR-1e-3} ${MORE:=} '${BASE:-2}'"
    assert split_words(text, PATH) == ["--rotary-base", "1000000", "--lr", "1e-3", "${BASE:-2}"]
    defaults = read_arguments_file(text, PATH).defaults
    assert defaults == [Word("${BASE:-1000000}", 1), Word("${LR-1e-3}", 2), Word("${MORE:=}", 2)]


@pytest.mark.parametrize("outer", ["${LR:-$OTHER}", "${LR:+1}", "${LR:-$(pwd)}", "${#LR}"])
def test_other_ways_to_fill_in_are_refused(outer):
    with pytest.raises(HexiError, match="variables are not filled in"):
        split_words(f"--lr {outer}", PATH)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "#!/bin/bash\nA=$1\nB=( --lr $A )\n",
            (
                "line 2: $1: only a running shell knows it; write the value, or let bash fill it in: "
                "hexi plan CLUSTER.yaml -o plan.yaml -- bash -c 'source job.args; torchrun train.py"
            ),
        ),
        (
            "A=$1\ntorchrun train.py --micro-batch-size $A\n",
            (
                "line 1: $1: only a running shell knows it; write the value, or run the script up to its "
                "training: hexi plan CLUSTER.yaml -o plan.yaml -- bash job.args"
            ),
        ),
        ("srun bash -c don't --lr 1 \"", "line 1: 't: is not closed"),
        (
            "torchrun x.py --lr 1 --micro-batch-size 1\ntorchrun y.py --micro-batch-size 1",
            "lines 1, 2: starts 2 diff",
        ),
        ("A=1\npython3 tool.py --lr 1", "is a script in which no start of a training is found"),
        (
            "import torch\nfrom megatron.bridge import x\n",
            "line 1: this file is Python; of a Megatron Bridge",
        ),
        ("# c\nfrom a.b import (\n", "line 2: this file is Python"),
        (
            "policy:\n  megatron_cfg:\n    enabled: true",
            "line 2: megatron_cfg:: NeMo-RL trains under no plan",
        ),
    ],
)
def test_files_of_other_kinds_are_told_by_their_kind(text, said):
    with pytest.raises(HexiError, match=re.escape(said)):
        split_words(text, PATH)


def test_a_dollar_may_stand_for_itself():
    assert split_words("'$HOME' \\$HOME 5$ \"5$\"", PATH) == ["$HOME", "$HOME", "5$", "5$"]


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(HexiError, match="cannot be read"):
        read_words(tmp_path / "job.args")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--save-interval", "3"], None),
        (["--save", "a"], "a"),
        (["--save=a b"], "a b"),
        (["--save", "a", "--save=b=c"], "b=c"),
        (["--save=a", "--lr", "1", "--save", "b"], "b"),
        (["--save="], ""),
    ],
)
def test_the_last_value_of_a_flag_counts_in_either_spelling(words, value):
    assert last_value(words, "--save", PATH) == value


@pytest.mark.parametrize("words", [["--save"], ["--save", "--load", "a"]])
def test_a_flag_without_a_value_is_refused(words):
    with pytest.raises(HexiError, match="--save without a value; add it"):
        last_value(words, "--save", PATH)


def test_a_file_far_larger_than_any_launch_script_is_refused(tmp_path):
    path = tmp_path / "job.args"
    path.write_text("--lr 1e-3\n" * 80_000)
    with pytest.raises(HexiError, match=r"job\.args: 800000 bytes, more than the 262144 that are read"):
        read_words(path)


def test_lines_are_counted_once():
    """Counted in the whole text for every word they would take time by the square of them."""

    class Text(str):
        counted = 0

        def count(self, *words):
            Text.counted += 1
            return super().count(*words)

    with pytest.raises(HexiError, match="line 2001"):
        split_words(Text("--lr 1e-3\n" * 2000 + "$HOME"), PATH)
    assert Text.counted == 0


def test_words_that_are_alike_on_a_line_stay_and_an_array_in_another_is_read_once():
    text = 'MODEL=( --num-layers 2 --num-query-groups 2 )\nOTHER=(--lr 2)\nALL=( "${MODEL[@]}" --bf16 )\n'
    text += 'JOB=( "${ALL[@]}" )\n'
    words = ["--lr", "2", "--num-layers", "2", "--num-query-groups", "2", "--bf16"]
    assert split_words(text, Path("job.sh")) == words
