"""The command `hexi`: exit codes, which stream gets what, and help."""

import json
import sys
from pathlib import Path

import pytest
import typer

import megatron_hexi
from megatron_hexi.cli import checkout, options, plans
from megatron_hexi.cli import main as cli
from megatron_hexi.cli.output import print_report, say
from megatron_hexi.errors import HexiError
from megatron_hexi.models.presets import presets
from megatron_hexi.plan import Workload, plan_digest, proportional_plan, read_plan, write_plan
from tests.support.shell import call_hexi, is_one_error_line

COMMANDS = [
    "capture",
    "catalog",
    "compare",
    "doctor",
    "launch",
    "launch-probe",
    "patch",
    "place",
    "plan",
    "probe",
    "proportion",
    "recipe",
    "report",
    "show",
    "simulate",
    "slurm-arguments",
    "testbed",
    "unpatch",
    "validate",
]


@pytest.fixture
def hexi(monkeypatch, capsys):
    """Calls ``hexi WORDS…`` as a shell would."""
    return lambda *words: call_hexi(monkeypatch, capsys, words)


@pytest.fixture
def plan(tmp_path):
    """A plan file: a fast group of three ranks and a slow one of two."""
    path = tmp_path / "plan.yaml"
    write_plan(proportional_plan(Workload(4096, 16, 4, 64), [[[2, 2, 2], [1, 1]]]), path)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["--nonsense"],
        ["nonsense"],
        ["show"],
        ["show", "plan.yaml", "--nonsense"],
        ["show", "a.yaml", "b.yaml"],
        ["show", "absent.yaml"],
        ["validate", "absent.yaml"],
        ["patch", "absent"],
        ["unpatch", "absent"],
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_on_stderr_and_code_2(hexi, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = hexi(*words)
    assert result.code == 2
    assert result.out == ""
    assert is_one_error_line(result.err)


def test_our_fault_keeps_its_traceback(monkeypatch):
    def broken(path):
        raise ZeroDivisionError

    monkeypatch.setattr(plans, "read_plan", broken)
    monkeypatch.setattr(sys, "argv", ["hexi", "validate", "plan.yaml"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_version(hexi):
    assert hexi("--version") == (0, f"megatron-hexi {megatron_hexi.__version__}\n", "")


@pytest.mark.parametrize("words", [[], ["--help"]], ids=["nothing", "--help"])
def test_help_lists_every_command(hexi, words):
    result = hexi(*words)
    assert result.code == 0
    assert all(command in result.out for command in COMMANDS)
    assert "..." not in result.out.partition("Commands:")[2]  # no summary is cut off


def test_help_names_every_preset():
    assert tuple(presets()) == options.PRESETS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(hexi, command):
    result = hexi(command, "--help")
    assert result.code == 0
    assert f"Example: hexi {command} " in result.out


def test_every_command_is_tested_here():
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    assert sorted(group.commands) == COMMANDS


def test_validate_accepts(hexi, plan):
    assert hexi("validate", plan) == (0, f"{plan}: a valid plan for 5 ranks\n", "")


def test_validate_as_json(hexi, plan):
    result = hexi("validate", plan, "--json")
    digest = plan_digest(read_plan(plan))
    assert json.loads(result.out) == {"plan": str(plan), "valid": True, "ranks": 5, "digest": digest}
    assert (result.code, result.err) == (0, "")


def test_validate_says_what_is_wrong_in_json_too(hexi, plan):
    plan.write_text(plan.read_text().replace("seq_length: 4096", "seq_length: 4097"))
    result = hexi("validate", plan, "--json")
    document = json.loads(result.out)
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert document["valid"] is False
    assert document["error"] in result.err


def test_show_as_json_is_one_document(hexi, plan, tmp_path):
    picture = tmp_path / "plan.png"
    result = hexi("show", plan, "--json", "--picture", picture)
    document = json.loads(result.out)
    assert (result.code, result.err) == (0, f"drew {picture}\n")
    assert [row["rank"] for row in document["ranks"]] == [0, 1, 2, 3, 4]
    assert sum(row["tokens"] for row in document["ranks"]) == document["plan"]["workload"]["seq_length"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_show_has_a_line_for_every_rank(hexi, plan):
    result = hexi("show", plan)
    assert (result.code, result.err) == (0, "")
    for row in json.loads(hexi("show", plan, "--json").out)["ranks"]:
        assert any(
            f" {row['rank']} │" in line and f"{row['tokens']:,}" in line for line in result.out.splitlines()
        )


@pytest.mark.parametrize("name", ["plan.xyz", "plan", "absent/plan.png"])
def test_show_refuses_a_picture_that_it_cannot_write(hexi, plan, tmp_path, name):
    result = hexi("show", plan, "--picture", tmp_path / name)
    assert (result.code, result.out) == (2, "")
    assert is_one_error_line(result.err)


def test_patch_and_unpatch_say_what_they_changed(hexi, monkeypatch, tmp_path):
    files = [tmp_path / "pretrain_gpt.py", tmp_path / "pretrain_hybrid.py"]
    monkeypatch.setattr(checkout, "patch_checkout", lambda checkout: files)
    monkeypatch.setattr(checkout, "unpatch_checkout", lambda checkout: files[:1])
    assert hexi("patch", tmp_path) == (0, "", f"patched {files[0]}\npatched {files[1]}\n")
    assert hexi("unpatch", tmp_path) == (0, "", f"restored {files[0]}\n")


def test_patch_passes_a_refusal_on(hexi, monkeypatch):
    def refuse(checkout: Path):
        raise HexiError(f"{checkout}: patched already")

    monkeypatch.setattr(checkout, "patch_checkout", refuse)
    assert hexi("patch", "somewhere") == (2, "", "hexi: error: somewhere: patched already\n")


SIZES = ("--seq-length", 1021, "--num-attention-heads", 8, "--num-query-groups", 4, "--kv-channels", 16)


def test_proportion_writes_a_plan_that_can_be_read(hexi, tmp_path):
    path = tmp_path / "plan.yaml"
    result = hexi("proportion", "--speeds", "4,3,2/3", "--speeds", "1,1,1,1", *SIZES, "-o", path)
    assert (result.code, result.out) == (0, "")
    assert read_plan(path) == proportional_plan(Workload(1021, 8, 4, 16), [[[4, 3, 2], [3]], [[1, 1, 1, 1]]])


@pytest.mark.parametrize("speeds", ["4,x", "\u0663", "4,,3", "4,0", "4,-1", "nan", "inf", "1/"])
def test_proportion_refuses_what_is_no_speed(hexi, tmp_path, speeds):
    path = tmp_path / "plan.yaml"
    result = hexi("proportion", "--speeds", speeds, *SIZES, "-o", path)
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert f"--speeds {speeds}: " in result.err
    assert not path.exists()


@pytest.mark.parametrize(
    "wrong",
    [("--seq-length", 0), ("--num-attention-heads", 0), ("--num-query-groups", 3), ("--prefetch-steps", 0)],
)
def test_proportion_refuses_sizes_that_no_plan_has(hexi, tmp_path, wrong):
    path = tmp_path / "plan.yaml"
    result = hexi("proportion", "--speeds", "2/1", *SIZES, *wrong, "-o", path)
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("hexi pl", {"plan", "place"}),
        ("hexi plan --seq-", {"--seq-length"}),
        ("hexi plan --no-s", {"--no-sequence-parallel"}),
    ],
)
def test_a_shell_completes_commands_and_options(hexi, monkeypatch, words, completed):
    monkeypatch.setenv("_HEXI_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    result = hexi()
    assert (result.code, set(result.out.split()), result.err) == (0, completed, "")


def test_nothing_that_is_printed_changes_a_terminal(capsys):
    from rich.table import Table

    name = "a\x1b[31mb\x07c\0d\x9b"
    table = Table("name", "other")
    table.add_row(name, "second")
    print_report(table)
    say(f"wrote {name}\nand more")
    printed = capsys.readouterr()
    assert r"a\x1b[31mbc\x00d\x9b" in printed.out  # rich itself leaves bells out
    assert len(printed.out.splitlines()) == 5
    assert printed.err == r"wrote a\x1b[31mb\x07c\x00d\x9b\nand more" + "\n"
    assert all(char.isprintable() or char == "\n" for char in printed.out)
