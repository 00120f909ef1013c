"""``… -m megatron_hexi.run PRETRAIN_SCRIPT.py [its arguments]``: runs an unmodified script.

Works the same under torchrun and under SLURM's ``srun``.
"""

from __future__ import annotations

import os
import runpy
import sys

from megatron_hexi.errors import HexiError, user_errors

_USAGE = (
    "usage: python -m megatron_hexi.torchrun --nproc-per-node 8 -m megatron_hexi.run pretrain_gpt.py "
    "--hexi-plan plan.yaml …"
)


def main(argv: list[str]) -> None:
    """Run a training script as ``python SCRIPT …`` would, with the adaptor imported first.

    Raises:
        SystemExit: help was asked for, the script is missing, or its arguments are wrong (exit code 2).
    """
    with user_errors():
        if not argv:
            raise HexiError(f"no training script given; {_USAGE}")
        if argv[0] in ("-h", "--help"):
            print(_USAGE)
            raise SystemExit(0)
        script = argv[0]
        if not os.path.isfile(script):
            raise HexiError(f"{script}: no such training script; {_USAGE}")
        from megatron_hexi.platform.slurm import adopt_slurm_environment

        adopt_slurm_environment(os.environ)

    # As in Python: the script's own directory comes first on the path, in place of ours.
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(script))

    with user_errors():
        import megatron_hexi.adaptor  # noqa: F401

        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
