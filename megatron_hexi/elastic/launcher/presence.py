"""Which agents of a job have ended, by the connection that each holds to the store's gate.

The system closes the connections of a process that ends, killed or not. So the end of an agent is known at
once, where its missing signs of life would say so after seconds; a node that loses its power or its link is
silent only.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import astuple, dataclass

import torch.distributed as dist

from megatron_hexi.elastic.channel import PROOF_S, connect

#: Begins such a connection; those of the store's clients begin with the byte of a request.
GREETING = b"agent "
#: Key of the agents that have ended, in the job's store.
_ENDED = "hexi.ended"


@dataclass(frozen=True)
class AgentName:
    """A running agent, as others know it.

    Args:
        node: name of its node in the cluster file.
        address: address at which other nodes reach it.
        process: number of its process there.
    """

    node: str
    address: str
    process: int


def hold_line(address: tuple[str, int], secret: bytes, name: AgentName) -> ssl.SSLSocket:
    """Return a connection that says, until it is closed, that an agent is there.

    Args:
        address: host and port of the store's gate.
        secret: the job's secret.
        name: name of the agent.

    Raises:
        OSError: there is no gate, or it has another secret.
    """
    line = connect(address, secret, PROOF_S)
    line.sendall(GREETING + json.dumps(astuple(name)).encode() + b"\n")
    return line


def ended_agents(store: dist.Store) -> frozenset[AgentName]:
    """Return the agents that have ended, by what the store says."""
    return frozenset(AgentName(*entry) for entry in json.loads(store.get(_ENDED)))


class Presence:
    """The gate's list of agents that have ended.

    Args:
        store: the store, by a client that nothing else uses.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._ended: set[str] = set()
        self._writing = asyncio.Lock()
        store.set(_ENDED, "[]")

    async def keep(self, begin: bytes, reader: asyncio.StreamReader) -> None:
        """Keep an agent's connection until it ends.

        Args:
            begin: its first bytes, from its greeting on.
            reader: what follows them.

        Raises:
            OSError: the connection broke.
        """
        greeting = begin if begin.endswith(b"\n") else begin + await reader.readline()
        name = greeting.removeprefix(GREETING).decode().strip()
        AgentName(*json.loads(name))
        self._ended.discard(name)  # its process number may be that of an earlier one
        await self._write()
        try:
            await reader.read()
        finally:
            self._ended.add(name)
            await self._write()

    async def _write(self) -> None:
        async with self._writing:
            text = f"[{','.join(sorted(self._ended))}]"
            await asyncio.to_thread(self._store.set, _ENDED, text)
