"""`hexi patch` and `hexi unpatch` on a small stand-in for a Megatron-LM checkout."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from megatron_hexi.cli.checkout import (
    checkout_is_patched,
    known_diffs,
    patch_checkout,
    read_diff,
    unpatch_checkout,
)
from megatron_hexi.errors import HexiError

GPT = b'"""Pretrain."""\nimport time\n\nimport torch\nprint(time, torch)'  # no newline at the end
HYBRID = b"import torch\n"
LINE = b"import megatron_hexi.adaptor  # noqa: F401  isort: skip\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pretrain_gpt.py").write_bytes(GPT)
    (folder / "pretrain_hybrid.py").write_bytes(HYBRID)
    (folder / "pretrain_gpt.py").chmod(0o755)
    return folder


@pytest.fixture
def diff(tmp_path: Path) -> Path:
    path = tmp_path / "small.diff"
    path.write_text(
        f"# pretrain_gpt.py sha256 {hashlib.sha256(GPT).hexdigest()}\n"
        f"# pretrain_hybrid.py sha256 {hashlib.sha256(HYBRID).hexdigest()}\n"
        "--- a/pretrain_gpt.py\n+++ b/pretrain_gpt.py\n@@ -3,0 +4 @@\n+"
        + LINE.decode()
        + "--- a/pretrain_hybrid.py\n+++ b/pretrain_hybrid.py\n@@ -0,0 +1 @@\n+"
        + LINE.decode()
    )
    return path


def contents(checkout: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkout.iterdir()}


def test_patching_adds_one_line_to_each_script(checkout: Path, diff: Path) -> None:
    changed = patch_checkout(checkout, [diff])
    assert [path.name for path in changed] == ["pretrain_gpt.py", "pretrain_hybrid.py"]
    assert contents(checkout) == {
        "pretrain_gpt.py": GPT.replace(b"\nimport torch", b"\n" + LINE + b"import torch"),
        "pretrain_hybrid.py": LINE + HYBRID,
    }


def test_unpatching_restores_every_byte_and_the_mode(checkout: Path, diff: Path) -> None:
    patch_checkout(checkout, [diff])
    unpatch_checkout(checkout, [diff])
    assert contents(checkout) == {"pretrain_gpt.py": GPT, "pretrain_hybrid.py": HYBRID}
    assert stat.S_IMODE((checkout / "pretrain_gpt.py").stat().st_mode) == 0o755


def test_the_state_can_be_asked_for(checkout: Path, diff: Path) -> None:
    assert not checkout_is_patched(checkout, [diff])
    patch_checkout(checkout, [diff])
    assert checkout_is_patched(checkout, [diff])
    (checkout / "pretrain_gpt.py").write_bytes(GPT)
    with pytest.raises(HexiError, match=r"only pretrain_hybrid.py is patched; restore"):
        checkout_is_patched(checkout, [diff])


def test_patching_twice_is_refused(checkout: Path, diff: Path) -> None:
    patch_checkout(checkout, [diff])
    before = contents(checkout)
    with pytest.raises(HexiError, match=r"pretrain_gpt.py: patched already; .*hexi unpatch"):
        patch_checkout(checkout, [diff])
    assert contents(checkout) == before


def test_unpatching_an_unpatched_checkout_is_refused(checkout: Path, diff: Path) -> None:
    with pytest.raises(HexiError, match=r"pretrain_gpt.py: not patched; .*hexi patch"):
        unpatch_checkout(checkout, [diff])


@pytest.mark.parametrize("undo", [False, True])
def test_a_file_changed_by_others_is_left_alone_and_so_are_the_rest(
    checkout: Path, diff: Path, undo: bool
) -> None:
    if undo:
        patch_checkout(checkout, [diff])
    with (checkout / "pretrain_hybrid.py").open("ab") as file:
        file.write(b"# mine\n")
    before = contents(checkout)
    with pytest.raises(HexiError, match=r"pretrain_hybrid.py: not the original of small; restore it"):
        (unpatch_checkout if undo else patch_checkout)(checkout, [diff])
    assert contents(checkout) == before


def test_a_half_patched_checkout_is_refused_by_both(checkout: Path, diff: Path) -> None:
    patch_checkout(checkout, [diff])
    (checkout / "pretrain_hybrid.py").write_bytes(HYBRID)
    for operation in (patch_checkout, unpatch_checkout):
        with pytest.raises(HexiError, match=r"only pretrain_gpt.py is patched; restore it with git checkout"):
            operation(checkout, [diff])


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, diff: Path) -> None:
    with pytest.raises(
        HexiError, match=r"pretrain_gpt.py: not there; give the folder of a Megatron-LM checkout"
    ):
        patch_checkout(tmp_path, [diff])


def test_the_diff_that_knows_the_files_is_chosen(checkout: Path, diff: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.diff"
    other.write_text(diff.read_text().replace(hashlib.sha256(HYBRID).hexdigest(), "0" * 64))
    patch_checkout(checkout, [other, diff, other])
    assert (checkout / "pretrain_hybrid.py").read_bytes() == LINE + HYBRID


def test_a_failing_write_changes_nothing(checkout: Path, diff: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def fail_on_hybrid(source: str, target: Path) -> None:
        if Path(target).name == "pretrain_hybrid.py":
            raise PermissionError(13, "Permission denied", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_on_hybrid)
    with pytest.raises(
        HexiError, match=r"hybrid.py: cannot be written \(Permission denied\); .*; nothing was changed"
    ):
        patch_checkout(checkout, [diff])
    assert contents(checkout) == {"pretrain_gpt.py": GPT, "pretrain_hybrid.py": HYBRID}


def test_a_diff_that_removes_lines_is_refused(diff: Path) -> None:
    diff.write_text(diff.read_text() + "@@ -1 +1 @@\n-import time\n+import clock\n")
    with pytest.raises(HexiError, match=r"small.diff:11: .* does more than add a line"):
        read_diff(diff)


def test_the_diffs_that_are_shipped_add_our_line_alone() -> None:
    changed = {diff.name: read_diff(diff) for diff in known_diffs()}
    assert {name: [change.name for change in changes] for name, changes in changed.items()} == {
        "megatron-lm-core_v0.17.0.diff": ["pretrain_gpt.py"],
        "megatron-lm-core_v0.18.0.diff": ["pretrain_gpt.py"],
        "megatron-lm-core_v0.19.0.diff": ["pretrain_gpt.py", "pretrain_hybrid.py"],
    }
    for changes in changed.values():
        for change in changes:
            assert [line for _, line in change.insertions] == [LINE]
