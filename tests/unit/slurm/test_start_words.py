"""Words of a training in a Slurm job: the script's defaults, the user's own, and where it goes on from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Workload, proportional_plan, write_plan
from megatron_hexi.slurm import plan_start
from megatron_hexi.slurm.placement import TRACKER
from tests.support.plans import examples
from tests.support.shell import call_hexi, is_one_error_line

PATH = Path("job.args")
DEFAULTS = ["--hexi-plan", "plan.yaml", "--save", "ours", "--load", "ours", "--save-interval", "500"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def start(*words, again=False):
    return plan_start(words, PATH, plan="plan.yaml", checkpoints="ours", save_interval=500, again=again)


def saved(folder):
    """Let a checkpoint be in a folder."""
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / TRACKER).write_text("6")


def taken(words, flag):
    """Return the value that Megatron takes, which is the last."""
    found = None
    for number, word in enumerate(words):
        if word == flag:
            found = words[number + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def test_where_the_user_says_nothing_the_script_s_defaults_stand():
    assert start("--lr", "1").words == ("--lr", "1", *DEFAULTS, "--ckpt-format", "torch_dist")


_FLAGS = st.dictionaries(
    st.sampled_from(["--save", "--load", "--save-interval", "--ckpt-format"]),
    st.tuples(st.sampled_from(["7", "my folder", "a#b"]), st.booleans()),
)


@examples(100)
@given(own=_FLAGS, again=st.booleans())
def test_the_user_s_own_arguments_stand_in_either_spelling(own, again):
    words = [
        word
        for flag, (value, joined) in own.items()
        for word in ([f"{flag}={value}"] if joined else [flag, value])
    ]
    made = start(*words, again=again)
    assert list(made.words[: len(words)]) == words
    for flag, (value, _) in own.items():
        assert taken(made.words, flag) == value
    assert taken(made.words, "--save") == made.save == own.get("--save", ("ours",))[0]
    assert taken(made.words, "--load") == made.load == own.get("--load", (made.save,))[0]


@pytest.mark.parametrize(
    "words", [[], ["--save", "mine"], ["--save=mine"], ["--save=mine", "--load", "mine/"]]
)
@pytest.mark.parametrize("again", [False, True])
def test_a_training_goes_on_from_where_it_saves(words, again):
    saved("ours")
    saved("mine")
    made = start(*words, again=again)
    assert Path(made.load) == Path(made.save) == Path("mine" if words else "ours")
    assert taken(made.words, "--load") == made.load


@pytest.mark.parametrize("own", [["--load", "base"], ["--load=base", "--save", "mine"]])
def test_a_training_that_begins_elsewhere_goes_on_from_its_own_checkpoints(own):
    saved("base")
    assert taken(start(*own).words, "--load") == "base"
    # Slurm starts it again: before its first checkpoint, and after that.
    assert taken(start(*own, again=True).words, "--load") == "base"
    saved(start(*own).save)
    made = start(*own, again=True)
    assert taken(made.words, "--load") == made.load == made.save != "base"


def test_a_training_that_could_not_tell_its_own_checkpoints_is_refused():
    saved("ours")
    with pytest.raises(
        HexiError, match=re.escape("job.args: --load base, and ours, where it saves, holds a")
    ):
        start("--load", "base")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--finetune"],
            "--finetune begins again at iteration 0 at every start; give --pretrained-checkpoint",
        ),
        (["--ckpt-step=7"], "--ckpt-step loads that step at every start; leave it out"),
        (["--hexi-plan", "b.yaml"], "--hexi-plan b.yaml, and ranks are placed by plan.yaml; leave it out"),
        (["--save"], "--save without a value; add it"),
    ],
)
def test_what_could_not_go_on_is_refused(words, said):
    with pytest.raises(HexiError, match=re.escape(f"job.args: {said}")):
        start(*words)


def test_the_plan_may_be_named_twice():
    assert start("--hexi-plan=plan.yaml").words.count("plan.yaml") == 0


OPTIONS = ("--plan", "plan.yaml", "--checkpoints", "ours", "-o", "words")


@pytest.fixture
def plan():
    """The plan of `OPTIONS`, for one rank."""
    write_plan(proportional_plan(Workload(8, 2, 2, 8), [[[1.0]]]), Path("plan.yaml"))


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("restarts", [None, "0", "1"])
def test_the_command_writes_the_words(monkeypatch, capsys, restarts):
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    PATH.write_text("--wandb-exp-name 'run #3' --load base # where it begins")
    if restarts == "1":
        saved("ours")
    done = call_hexi(monkeypatch, capsys, ("slurm-arguments", PATH, *OPTIONS))
    assert done.code == 0
    load = "ours" if restarts == "1" else "base"
    assert done.out == f"saves in ours; goes on from {load}\n"
    assert Path("words").read_text().split("\0")[:4] == ["--wandb-exp-name", "run #3", "--load", "base"]


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing", "--save 'a", "--finetune"),
        *("[[[[ foo", "--bf16\n[[[[ foo", "--bf16 --no-such 3", "--fp4-format e2m1", "--lr x"),
    ],
)
def test_the_command_writes_nothing_where_it_refuses(monkeypatch, capsys, text):
    PATH.write_text(text)
    done = call_hexi(monkeypatch, capsys, ("slurm-arguments", PATH, *OPTIONS))
    assert done.code == 2
    assert is_one_error_line(done.err)
    assert "job.args" in done.err
    assert not Path("words").exists()


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "words/"], "'words/' is a folder; give the name of a file in it"),
        (["-o", "-words"], "'-words' begins as an option does; write './-words'"),
        (["--save-interval", "0"], "--save-interval 0: give a number of iterations above 0"),
        (["--plan", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--checkpoints", "job.args"], "--checkpoints job.args: is a file"),
        (["--checkpoints="], "'--checkpoints=': is empty (is a variable not set?)"),
    ],
)
def test_the_command_checks_its_options(monkeypatch, capsys, words, said):
    PATH.write_text("--bf16")
    done = call_hexi(monkeypatch, capsys, ("slurm-arguments", PATH, *OPTIONS, *words))
    assert done.code == 2
    assert is_one_error_line(done.err)
    assert said in done.err
    assert not Path("words").exists()
