"""The entry point of a rank, and the process that ranks are forked from.

Importing Megatron takes seconds of a core. `multiprocessing`'s fork server imports this module once a node,
and with it Megatron; a rank that starts again is forked from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

#: Variable with the command line's words, by which the fork server chooses the platform.
WORDS_VARIABLE = "HEXI_ELASTIC_WORDS"
#: Modules that PyTorch's optimizers and Megatron import only when a rank has begun.
_IMPORTED_LATE = ("torch._dynamo", "megatron.core.tokenizers.text.models")
#: The module that ranks run without ``--script``.
ENTRY = "megatron_hexi.pretrain_gpt"


def run_rank(entry: str, words: tuple[str, ...], variables: dict[str, str]) -> None:
    """Run one rank until the training has ended."""
    os.environ |= variables
    sys.argv[:] = ["pretrain_gpt.py", *words]
    from megatron_hexi.errors import HexiError, user_errors

    with user_errors():
        import torch

        from megatron_hexi.platform.select import be_a_rank

        be_a_rank()
        from megatron_hexi.adaptor import platform

        if platform.name == "cuda" and torch.cuda._is_in_bad_fork():
            raise HexiError(
                "importing Megatron has initialised CUDA in the process that ranks are forked from; give "
                "--start-method spawn"
            )
    try:
        if entry == ENTRY:
            from megatron_hexi.pretrain_gpt import main

            main()
        else:
            from megatron_hexi.run import main as run_script

            run_script([entry, *words])
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    from megatron_hexi.elastic.training.round import leave

    leave()


def _preload() -> None:
    """Import the modules that ranks need. An import that fails here fails in each rank, which reports it."""
    sys.argv[:] = ["pretrain_gpt.py", *json.loads(os.environ[WORDS_VARIABLE])]
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other way initialises CUDA
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (handlers of logs keep it)
    with contextlib.redirect_stderr(nowhere), contextlib.suppress(BaseException):
        import importlib

        import torch

        from megatron_hexi.platform import requested_platform

        # A GPU's platform is one GPU's, so each rank installs its own. A CPU's must precede Megatron.
        if requested_platform(sys.argv[1:]) == "cpu" or not torch.cuda.is_available():
            import megatron_hexi.adaptor
        import megatron_hexi.patch_list  # noqa: F401
        from megatron_hexi.megatron.gpt import read_options

        for name in _IMPORTED_LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        read_options()


# The fork server alone has these words in its environment and no rank.
if (
    WORDS_VARIABLE in os.environ
    and "RANK" not in os.environ
    and os.environ.get("HEXI_AGENT") != str(os.getpid())
):
    _preload()
