"""Links of nodes on this machine that can be cut: a network namespace each, and a bridge to this process."""

from __future__ import annotations

import os
import subprocess
from typing import Self

#: Of this process, where nodes find the store.
HERE = "10.78.0.1"


class Links:
    """A context in which nodes have links; needs root.

    Args:
        names: of the nodes.
    """

    def __init__(self, *names: str) -> None:
        self._numbers = {name: number for number, name in enumerate(names, start=2)}
        self._bridge = f"hexi{os.getpid()}"

    def __enter__(self) -> Self:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{HERE}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name, number in self._numbers.items():
            space, port = self._space(name), self._port(name)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", self._bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")
            assert number < 250
        return self

    def __exit__(self, *raised: object) -> None:
        for name in self._numbers:
            # Sockets that nobody closed keep a namespace for minutes, and its link with it.
            subprocess.run(["ip", "link", "del", self._port(name)], check=False)
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False)
        _ip("link", "del", self._bridge)

    def address(self, name: str) -> str:
        """At which others reach a node."""
        return f"10.78.0.{self._numbers[name]}"

    def within(self, name: str) -> list[str]:
        """What a command begins with that runs on a node."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, name: str) -> None:
        """From now on nothing reaches the node, and nothing leaves it."""
        _ip("link", "set", self._port(name), "down")

    def mend(self, name: str) -> None:
        """Undo `cut`."""
        _ip("link", "set", self._port(name), "up")

    def _space(self, name: str) -> str:
        return f"{self._bridge}-{name}"

    def _port(self, name: str) -> str:
        return f"{self._bridge}p{self._numbers[name]}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)
