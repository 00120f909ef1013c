"""Options have Megatron's names, in every command; those of the release before are still read."""

from megatron_hexi.cli.renamed import RENAMED, with_present_names
from megatron_hexi.plan.flags import FLAGS
from scripts.docs.commands_page import commands
from tests.support.shell import call_hexi


def options() -> set[str]:
    """All options of all commands."""
    parameters = [parameter for _, command in commands() for parameter in command.params]
    return {name for one in parameters for name in (*one.opts, *one.secondary_opts)}


def test_no_command_has_a_former_name():
    # `hexi probe --heads` is of one rank: Megatron has no name for that.
    assert options() & RENAMED.keys() == {"--heads"}
    assert {flag for field, flag in FLAGS.items() if field != "optimizer"} <= options()


def test_a_former_name_is_replaced_where_the_command_has_the_present_one():
    words = ["plan", "--recompute", "full", "--data-parallel=2", "--heads", "2", "--", "--recompute", "full"]
    found = with_present_names(words, {"--recompute-granularity", "--data-parallel-size", "--heads"})
    assert found == ["plan", "--recompute-granularity", "full", "--data-parallel-size=2", *words[4:]]


def test_a_former_name_does_the_same_and_says_the_present_one(tmp_path, monkeypatch, capsys):
    sizes = ("--speeds", "2,1", "--seq-length", 64)
    present = ("--num-attention-heads", 4, "--kv-channels", 16, "-o", tmp_path / "present.yaml")
    former = ("--heads", 4, "--head-dim", 16, "-o", tmp_path / "former.yaml")
    assert call_hexi(monkeypatch, capsys, ("proportion", *sizes, *present)).code == 0
    result = call_hexi(monkeypatch, capsys, ("proportion", *sizes, *former))
    assert result.code == 0
    assert "note: --heads is now --num-attention-heads" in result.err
    assert (tmp_path / "former.yaml").read_text() == (tmp_path / "present.yaml").read_text()
