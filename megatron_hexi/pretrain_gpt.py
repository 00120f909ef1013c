"""``… -m megatron_hexi.pretrain_gpt [arguments]``: pretrains a GPT without a Megatron-LM checkout.

The megatron-core wheel has everything but a training script; this is one.
"""

from __future__ import annotations

import os

from megatron_hexi.errors import user_errors


def main() -> None:
    """Train by the command line.

    Raises:
        SystemExit: the user's input is wrong (exit code 2).
    """
    with user_errors():
        from megatron_hexi.platform.slurm import adopt_slurm_environment

        adopt_slurm_environment(os.environ)

        import megatron_hexi.adaptor  # noqa: F401  (before Megatron)
        from megatron_hexi.megatron.gpt import pretrain_from_command_line

        pretrain_from_command_line()


# Saving a checkpoint spawns a process that imports this module again: nothing may happen then.
if __name__ == "__main__":
    main()
