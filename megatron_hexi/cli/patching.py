"""``hexi patch`` and ``hexi unpatch``: our line in a Megatron-LM checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.cli.checkout import patch_checkout, unpatch_checkout
from megatron_hexi.cli.output import say

app = typer.Typer()

Checkout = Annotated[
    Path, typer.Argument(metavar="CHECKOUT", help="Folder of a Megatron-LM checkout, with pretrain_gpt.py.")
]


@app.command(epilog="Example: hexi patch ~/Megatron-LM")
def patch(checkout: Checkout) -> None:
    """Add the import line to a Megatron-LM checkout."""
    for path in patch_checkout(checkout):
        say(f"patched {path}")


@app.command(epilog="Example: hexi unpatch ~/Megatron-LM")
def unpatch(checkout: Checkout) -> None:
    """Remove the import line from a Megatron-LM checkout.

    Restores every file byte for byte.
    """
    for path in unpatch_checkout(checkout):
        say(f"restored {path}")
