"""Megatron Bridge from its wheel, with stand-ins for packages that it imports and a small GPT does not use.

Bridge asks for some forty packages; several need a GPU to be installed or are larger than all else here. The
wheel is unpacked beside the environment's packages (`scripts/bootstrap.sh`), with the two packages that read
its configuration. Transformer Engine is emulated (`te_emulated`).
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_hexi.platform import cpu_device
from tests.megatron import te_emulated

#: Where `scripts/bootstrap.sh` unpacks the wheel; set MEGATRON_BRIDGE to another place.
WHEEL = Path(os.environ.get("MEGATRON_BRIDGE", Path(sys.prefix) / "megatron-bridge"))
#: Packages that are stood in for, with all modules in them.
_ABSENT = ("datasets", "megatron.energon", "modelopt", "torch.utils.tensorboard")
#: A package that takes seconds to import, of which later versions lack modules that Bridge imports.
_SLOW = "transformers"
#: Modules that are stood in for alone: others of their package are missing.
_ALONE = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")


def is_available() -> bool:
    """Whether the wheels of Bridge and of Transformer Engine are unpacked."""
    return (WHEEL / "megatron" / "bridge").is_dir() and te_emulated.is_available()


def install(*, imports_models: bool = False) -> None:
    """Let Bridge be imported. Call it before Megatron is imported.

    Args:
        imports_models: whether models are imported from Hugging Face.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    te_emulated.install()
    # Transformer Engine asks whether CUDA is there as Megatron does.
    callers = vars(cpu_device)
    callers["MEGATRON_MODULES"] = (*callers["MEGATRON_MODULES"], "transformer_engine.")
    sys.path.append(str(WHEEL))
    sys.meta_path.insert(0, _StandIns((*_ABSENT, *(() if imports_models else (_SLOW,)))))
    sys.meta_path.append(_StandIns((_SLOW,)))  # found last: modules that it lacks


class _AnyName(abc.ABCMeta):
    """The type of a class that has every name."""

    def register(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else None

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})

    def __contains__(cls, item: Any) -> bool:
        return True  # registered already

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_decorator else super().__call__(*args, **kwargs)


class _Anything(metaclass=_AnyName):
    """An object that is made and called with any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else None  # as a decorator

    def __bool__(self) -> bool:
        return False  # to `is_flash_attn_2_available()` and the like

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _StandIn(ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Anything,), {})
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for all modules of some packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        absent = any(f"{fullname}.".startswith(f"{package}.") for package in self._packages)
        if not (absent or fullname in _ALONE):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "modelopt.torch.distill.plugins.megatron":
            module.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
        if module.__name__ == "transformers":
            module.__version__ = "5.12.1"
