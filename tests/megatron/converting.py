"""``megatron_hexi.convert`` in a forked rank, where the platform is installed already."""

from __future__ import annotations

import megatron_hexi.platform
from megatron_hexi.convert.__main__ import main as convert


class _Installed:
    def install(self) -> None:
        pass


def main() -> None:
    megatron_hexi.platform.select_platform = lambda name: _Installed()  # type: ignore[assignment, return-value]
    convert()
