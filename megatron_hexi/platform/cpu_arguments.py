"""Defaults of Megatron's command line that cannot work on a CPU."""

from __future__ import annotations

from argparse import Namespace

from megatron_hexi.errors import PlatformError

#: dest of the argument, the flag that sets it, what it is on a CPU.
_DEFAULTS = (
    ("distributed_backend", "--distributed-backend", "gloo"),
    ("transformer_impl", "--transformer-impl", "local"),
    ("apply_rope_fusion", "--no-rope-fusion", False),
    ("masked_softmax_fusion", "--no-masked-softmax-fusion", False),
    ("no_persist_layer_norm", "--no-persist-layer-norm", True),
    ("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", False),
)


def adjust_cpu_arguments(args: Namespace, given: set[str]) -> list[str]:
    """Replace the defaults that need a GPU by what a CPU can do.

    Args:
        args: Megatron's parsed arguments; changed in place.
        given: the flags that the user wrote, as written (``"--distributed-backend"``).

    Returns:
        What was changed, as flags with their values, for the user to read.

    Raises:
        PlatformError: the user asked for a value that needs a GPU.
    """
    changed = []
    for name, flag, value in _DEFAULTS:
        present = getattr(args, name)
        if present == value:
            continue
        if flag in given:
            raise PlatformError(
                f"{flag} {present}: needs a GPU, and --hexi-platform is cpu; leave {flag} out or give {value}"
            )
        setattr(args, name, value)
        changed.append(flag if isinstance(value, bool) else f"{flag} {value}")
    return changed
