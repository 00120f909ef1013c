"""Patches are checked, put on, rebound and taken off."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_hexi import patching
from megatron_hexi.errors import PatchError
from megatron_hexi.patching import Patch, PatchSet, is_installed


class Base:
    def inherited(self) -> str:
        return "base"


class Holder(Base):
    @staticmethod
    def static(value: int) -> int:
        return value


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module to patch, and one of Megatron's that has imported a function of it by name."""
    module = types.ModuleType("patched_library")
    exec("def add(a, b):\n    return a + b\n", vars(module))
    module.Holder = Holder  # type: ignore[attr-defined]
    user = types.ModuleType("megatron.user")
    user.plus = module.add  # type: ignore[attr-defined]
    stranger = types.ModuleType("stranger")
    stranger.plus = module.add  # type: ignore[attr-defined]
    for each in (module, user, stranger):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return module


@pytest.fixture
def patch_sets() -> Iterator[list[PatchSet]]:
    """Patch sets to take off after the test."""
    sets: list[PatchSet] = []
    yield sets
    for patch_set in reversed(sets):
        patch_set.remove()


def patch(target: str, build: Callable[[Any], Any], **options: Any) -> Patch:
    return Patch(target, "for a test", build, package="torch", versions=">=1", **options)


def plus_one(original: Callable[..., int]) -> Callable[..., int]:
    return lambda a, b: original(a, b) + 1


def test_a_patch_replaces_rebinds_and_is_removed(library: types.ModuleType) -> None:
    original = library.add
    patches = PatchSet([patch("patched_library:add", plus_one, parameters=("a", "b"))])
    patches.install()
    assert library.add(1, 2) == 4
    assert sys.modules["megatron.user"].plus is library.add
    assert sys.modules["stranger"].plus is original, "only Megatron is rebound"
    patches.remove()
    assert library.add is original
    assert sys.modules["megatron.user"].plus is original
    assert not patches.installed


def test_an_inherited_attribute_is_inherited_again_after_removal(library: types.ModuleType) -> None:
    patches = PatchSet([patch("patched_library:Holder.inherited", lambda original: lambda self: "patched")])
    patches.install()
    assert Holder().inherited() == "patched"
    assert Base().inherited() == "base"
    patches.remove()
    assert Holder().inherited() == "base"
    assert "inherited" not in vars(Holder)


def test_a_static_method_stays_one(library: types.ModuleType, patch_sets: list[PatchSet]) -> None:
    before = vars(Holder)["static"]
    patches = PatchSet(
        [
            patch(
                "patched_library:Holder.static",
                lambda original: staticmethod(lambda value: original.__func__(value) * 10),
                parameters=("value",),
            )
        ]
    )
    patch_sets.append(patches)
    patches.install()
    assert Holder.static(2) == 20
    patches.remove()
    assert vars(Holder)["static"] is before


def test_two_patches_of_one_target_wrap_each_other(library: types.ModuleType) -> None:
    original = library.add
    patches = PatchSet([patch("patched_library:add", plus_one), patch("patched_library:add", plus_one)])
    patches.install()
    assert library.add(1, 2) == 5
    patches.remove()
    assert library.add is original


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (patch("patched_library:subtract", plus_one), "not found in torch"),
        (patch("no_such_library:add", plus_one), "not found in torch"),
        (
            patch("patched_library:add", plus_one, parameters=("x", "y")),
            "expected the parameters x, y, found a, b",
        ),
        (
            Patch("patched_library:add", "", plus_one, package="torch", versions="<1"),
            "written for torch <1, found",
        ),
    ],
)
def test_nothing_is_replaced_when_one_target_is_not_as_expected(
    library: types.ModuleType, bad: Patch, message: str
) -> None:
    original = library.add
    patches = PatchSet([patch("patched_library:add", plus_one), bad])
    with pytest.raises(PatchError, match=message):
        patches.install()
    assert library.add is original
    assert not patches.installed


def test_nothing_stays_replaced_when_a_replacement_cannot_be_built(library: types.ModuleType) -> None:
    def fail(original: Any) -> Any:
        raise RuntimeError("no")

    original = library.add
    patches = PatchSet([patch("patched_library:add", plus_one), patch("patched_library:Holder", fail)])
    with pytest.raises(RuntimeError):
        patches.install()
    assert library.add is original
    assert not patches.installed


def test_installing_twice_is_refused(library: types.ModuleType, patch_sets: list[PatchSet]) -> None:
    patches = PatchSet([patch("patched_library:add", plus_one)])
    patch_sets.append(patches)
    patches.install()
    with pytest.raises(PatchError, match="installed already"):
        patches.install()


def test_a_patch_for_something_not_installed_is_left_out(library: types.ModuleType) -> None:
    assert PatchSet([patch("patched_library:add", plus_one, requires="no_such_library")]).patches == ()


def test_a_patch_for_other_versions_is_left_out(library: types.ModuleType) -> None:
    there = patch("patched_library:add", plus_one, only=">=1")
    gone = patch("patched_library:subtract", plus_one, only="<1")
    assert PatchSet([there, gone]).patches == (there,)


def test_a_version_that_no_patch_is_for_is_refused_by_those_of_its_side(library: types.ModuleType) -> None:
    early, late = (
        Patch("patched_library:add", "", plus_one, package="torch", versions="<1", only=only)
        for only in ("<0.5", ">=0.5")
    )
    patches = PatchSet([early, late])
    assert patches.patches == (late,)
    with pytest.raises(PatchError, match="written for torch <1, found"):
        patches.install()


def test_parameters_may_differ_by_version(library: types.ModuleType) -> None:
    right = patch("patched_library:add", plus_one, parameters={"<1": ("x",), ">=1": ("a", "b")})
    right.locate()
    wrong = patch("patched_library:add", plus_one, parameters={"<1": ("a", "b"), ">=1": ("a", "b", "c")})
    with pytest.raises(PatchError, match="expected the parameters a, b, c, found a, b"):
        wrong.locate()


@pytest.mark.parametrize(
    ("installed", "later"), [("0.18.2", False), ("0.19.0rc1", True), ("0.19.2+0c90725", True)]
)
def test_a_prerelease_counts_as_what_it_leads_to(
    installed: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patching, "_version", lambda package: installed)
    assert is_installed(">=0.19") is later
    assert is_installed("<0.19") is not later
