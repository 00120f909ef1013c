"""``megatron_hexi.run`` as an entry point of forked ranks: the first argument is a training script."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the script as the launcher does."""
    from megatron_hexi import run

    run.main(sys.argv[1:])
