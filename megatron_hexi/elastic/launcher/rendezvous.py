"""The rendezvous of a job's agents, which starts ranks again for other reasons than PyTorch's does."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from megatron_hexi.elastic.launcher.life import RoundLife
from megatron_hexi.elastic.store import BROKEN, TRAINING, WANTED


class PatientRendezvous(RendezvousHandler):
    """A rendezvous that tells ranks of waiting nodes, for which PyTorch's agent would end the ranks at once.

    Args:
        inner: PyTorch's rendezvous.
    """

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner
        #: The store that the present round's ranks share with their agents; ``None``: no ranks run.
        self.round: dist.Store | None = None
        #: The life of the present round's nodes, and whether as many as can take part are in it.
        self.life: RoundLife | None = None
        self.is_full = False

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler.next_rendezvous`."""
        self.round = None
        return self._inner.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes for which the ranks are to be started again now.

        It is 0 while ranks train: these are told of waiting nodes in the round's store and end after a
        checkpoint, and notice lost nodes by themselves. Ranks that are still starting would wait for a lost
        node, so it counts.
        """
        waiting = self._inner.num_nodes_waiting()
        if self.round is None or self.life is None or self.round.check([BROKEN]):
            return waiting
        trains = self.round.check([TRAINING])
        lost = self.life.count_lost() if waiting or not trains else 0
        # PyTorch counts those nodes, too, for which a round that is full had no room.
        waiting = min(waiting, lost) if self.is_full else waiting
        if not trains:
            return max(waiting, lost)
        if waiting:
            self.round.set(WANTED, str(waiting))
        return 0

    def get_backend(self) -> str:
        """See `RendezvousHandler.get_backend`."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """See `RendezvousHandler.use_agent_store`."""
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        """See `RendezvousHandler.is_closed`."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See `RendezvousHandler.set_closed`."""
        self._inner.set_closed()

    def get_run_id(self) -> str:
        """See `RendezvousHandler.get_run_id`."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """See `RendezvousHandler.shutdown`."""
        return self._inner.shutdown()
