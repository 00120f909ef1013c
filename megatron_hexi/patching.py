"""Patches of Megatron: small replacements, checked before installation, and removable.

A `Patch` states its `target`, its purpose, the versions of megatron-core (or of another `package`), and the
names of parameters that the target must have. Where versions differ, the parameters are given by version, and
a target that only some versions have has a patch for those (`only`). A `PatchSet` installs and removes a list
of patches. Modules that imported the original by name are rebound too, so Megatron may be imported before
this package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_hexi.errors import PatchError

#: Megatron and the training scripts: their globals may hold a second name for a patched function
#: (`from x import f`).
MEGATRON_MODULES = (
    "megatron.",
    "__main__",
    "pretrain_gpt",
    "pretrain_hybrid",
    "gpt_builders",
    "model_provider",
)

_STEP = (
    *("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
    *("forward_backward_func", "iteration"),
)
#: Parameters of `megatron.training.training:train_step`, which several patches wrap, by version.
STEP_PARAMETERS = {"<0.19": _STEP, ">=0.19": (*_STEP, "pg_collection", "p2p_communicator")}

#: Marks an attribute that the holder did not have itself (a class that inherits it).
_INHERITED = object()


@dataclass(frozen=True)
class Patch:
    """A replacement of one attribute of a module or class.

    Args:
        target: ``"package.module:attribute"`` or ``"package.module:Class.attribute"``.
        why: the purpose in a sentence, shown by ``hexi doctor``.
        parameters: names of the original's parameters, in order; by version (PEP 440) where they differ;
            ``None`` where the target is no function.
        versions: the versions of `package` for which the replacement is right (PEP 440).
        only: the versions that have the target; in others the patch is not needed.
        requires: a module without which the patch is not needed and is left out (for example
            ``"transformer_engine"``).
        package: the distribution that `target` belongs to and `versions` speaks of.
    """

    target: str
    why: str
    build: Callable[[Any], Any] = field(repr=False)
    parameters: tuple[str, ...] | Mapping[str, tuple[str, ...]] | None = None
    versions: str = ">=0.17,<0.20"
    only: str = ""
    requires: str | None = None
    package: str = "megatron-core"

    def wanted(self) -> bool:
        """Whether the patched module is installed, in a version that has the target."""
        if self.requires is not None and importlib.util.find_spec(self.requires) is None:
            return False
        return not self.only or is_installed(self.only, self.package)

    def locate(self) -> tuple[Any, str, Any]:
        """Return the object that holds the target, the attribute's name, and its present value.

        Raises:
            PatchError: the target is missing, or its version or parameters are not as expected.
        """
        installed = _version(self.package)
        if installed is not None and not SpecifierSet(self.versions).contains(installed, prereleases=True):
            raise PatchError(
                f"patch of {self.target}: written for {self.package} {self.versions}, found {installed}; "
                f"install a {self.package} in that range"
            )
        module_name, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        try:
            holder: Any = importlib.import_module(module_name)
            for parent in parents:
                holder = getattr(holder, parent)
            original = inspect.getattr_static(holder, name)
        except (ImportError, AttributeError) as problem:
            raise PatchError(
                f"patch of {self.target}: not found in {self.package} {installed} ({problem}); "
                f"use {self.package} {self.versions}, unmodified"
            ) from problem
        expected = self._expected_parameters()
        if expected is not None:
            function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
            actual = tuple(inspect.signature(function).parameters)
            if actual != expected:
                raise PatchError(
                    f"patch of {self.target}: expected the parameters {', '.join(expected)}, found "
                    f"{', '.join(actual)}; use {self.package} {self.versions}, unmodified"
                )
        return holder, name, original

    def _expected_parameters(self) -> tuple[str, ...] | None:
        """Return the parameters of the target in the installed version."""
        if not isinstance(self.parameters, Mapping):
            return self.parameters
        return next(names for part, names in self.parameters.items() if is_installed(part, self.package))


def patched(
    target: str, *, parameters: tuple[str, ...] | Mapping[str, tuple[str, ...]] | None = None, **fields: Any
) -> Callable[[Callable[..., Any]], Patch]:
    """Decorate a function that replaces a function of Megatron, and takes the original as its first argument.

    The function becomes a `Patch`.

    Args:
        parameters: names of the original's parameters; ``None``: those of the decorated function, or any
            if it takes ``*args`` or ``**kwargs``.
    """

    def decorate(change: Callable[..., Any]) -> Patch:
        def build(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return change(original, *args, **kwargs)

            return replacement

        own = tuple(inspect.signature(change).parameters.values())[1:]
        takes_any = any(
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in own
        )
        names = None if takes_any else tuple(one.name for one in own)
        return Patch(target, build=build, parameters=names if parameters is None else parameters, **fields)

    return decorate


class PatchSet:
    """Patches that are installed together and removed together, in reverse order.

    Args:
        rebound: beginnings of the names of modules whose globals may hold a patched function.
    """

    def __init__(self, patches: Sequence[Patch], rebound: tuple[str, ...] = MEGATRON_MODULES) -> None:
        self.patches = tuple(patch for patch in patches if patch.wanted())
        self._rebound = rebound
        self._undo: list[tuple[Any, str, Any]] = []

    @property
    def installed(self) -> bool:
        """Whether the patches are installed."""
        return bool(self._undo)

    def install(self) -> None:
        """Check every target, then replace them all.

        Raises:
            PatchError: a target differs from what its patch expects (then nothing is replaced), or the set is
                installed already.
        """
        if self.installed:
            raise PatchError("these patches are installed already; remove() them first")
        for patch in self.patches:
            patch.locate()
        try:
            for patch in self.patches:
                # Located again: an earlier patch of this set may have replaced the same target.
                holder, name, original = patch.locate()
                replacement = patch.build(original)
                self._replace(holder, name, replacement)
                if inspect.ismodule(holder):
                    self._rebind(original, replacement)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restore every original."""
        while self._undo:
            holder, name, original = self._undo.pop()
            if original is _INHERITED:
                delattr(holder, name)
            else:
                setattr(holder, name, original)

    def _replace(self, holder: Any, name: str, replacement: Any) -> None:
        self._undo.append((holder, name, vars(holder).get(name, _INHERITED)))
        setattr(holder, name, replacement)

    def _rebind(self, original: Any, replacement: Any) -> None:
        for module_name, module in list(sys.modules.items()):
            if not module_name.startswith(self._rebound) or module_name.startswith("megatron_hexi."):
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is original:
                    self._replace(module, name, replacement)


def is_installed(versions: str, package: str = "megatron-core") -> bool:
    """Whether the installed version of a distribution is in a range.

    A pre-release counts as its release.

    Args:
        versions: the range (PEP 440).
        package: the distribution; if it is not installed, every version counts as installed.
    """
    installed = _version(package)
    return installed is None or SpecifierSet(versions).contains(Version(installed).base_version)


def _version(package: str) -> str | None:
    """Return the version of a distribution that Python would import.

    A Megatron-LM checkout on the path comes before an installed wheel, so Megatron itself is asked first.
    """
    if package == "megatron-core":
        try:
            return str(importlib.import_module("megatron.core.package_info").__version__)
        except (ImportError, AttributeError):
            pass
    return distribution_version(package)


@functools.cache  # it parses the distribution's metadata, and some hundred patches ask
def distribution_version(package: str) -> str | None:
    """Return the version of an installed distribution; ``None`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
