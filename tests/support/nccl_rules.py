"""NCCL's rules, as far as they decide whether ranks' calls fit together and end: a replay without data.

Ranks are taken at what they posted, in the order in which they posted it. The rules and where they stand:

* Messages. Each send meets a receive of the same count and type; between two ranks in the order in which
  they were posted, also inside a batch. (NCCL user guide, "Point-to-point communication".) Tags do not count
  for NCCL: where two that meet have different ones, gloo would deliver right and NCCL wrong.
* Batches. What stands between ncclGroupStart and ncclGroupEnd (one `batch_isend_irecv`) makes progress
  together, and blocks what follows until all of it is done. (Same page.)
* Queues. NCCL's kernels block until their data has come; several communicators are safe where operations can
  be carried out in the order of their launch. (User guide, "Using multiple NCCL communicators concurrently".)
  A rank has one queue over all communicators, as strict as a device can be (CUDA_DEVICE_MAX_CONNECTIONS=1):
  what ends so also ends with more of them, and with any waits of host or streams for what was posted before.
* Collectives. All ranks of a communicator call the same ones in the same order, with the same counts and
  types ("Collective Communication Functions"); in an all-to-all, one sends what the other expects.
* First calls. torch makes a communicator in a group's first call, and each rank waits there for all others.
  (`torch.distributed.batch_isend_irecv`: all ranks of the group must take part in its first call.) A message
  outside of a batch has a communicator of its two ranks alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Posted:
    """A message in a batch: `kind` is "send" or "receive", `peer` a rank of the job."""

    kind: str
    peer: int
    count: int
    dtype: str
    tag: int = 0

    def __str__(self) -> str:
        return f"a {self.kind} of {self.count} {self.dtype} (tag {self.tag})"


@dataclass(frozen=True)
class Call:
    """One call of a rank on a communicator: a batch of messages, or a collective.

    Args:
        communicator: its name, the same on all its ranks and on no others.
        ranks: of the communicator, numbered as in the job, in its order.
        messages: of a batch.
        collective: name of a collective.
        terms: what must be the same on all ranks of a collective.
        sent, received: of an all-to-all, elements for and from each rank.
    """

    communicator: str
    ranks: tuple[int, ...]
    messages: tuple[Posted, ...] = ()
    collective: str = ""
    terms: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"{self.collective}({self.terms})" if self.collective else "a batch of messages"
        return f"{what} on {self.communicator!r}"


class BrokenRuleError(AssertionError):
    """What ranks posted does not go together by NCCL's rules."""


def replay(posted: Sequence[Sequence[Call]], *, one_queue: bool = True) -> int:
    """Carry out what the ranks posted.

    Args:
        posted: the calls of each rank of the job, in order.
        one_queue: whether a rank carries out one call at a time, or one on each communicator.

    Returns:
        Operations carried out: messages and collectives, counted on each rank.

    Raises:
        BrokenRuleError: naming the rule, the ranks and the communicator.
    """
    first: dict[str, dict[int, Call]] = defaultdict(dict)
    for rank, calls in enumerate(posted):
        for call in calls:
            first[call.communicator].setdefault(rank, call)
    for calls_of in first.values():
        rank, call = next(iter(calls_of.items()))
        missing = sorted(set(call.ranks) - calls_of.keys())
        if missing:
            raise BrokenRuleError(f"first call: rank {rank} makes {call}, ranks {missing} none")
    return _Replay(posted, one_queue).run()


type _Key = tuple[int, str]


class _Replay:
    """Queues of calls; only the first call of each is under way."""

    def __init__(self, posted: Sequence[Sequence[Call]], one_queue: bool) -> None:
        self._queues: dict[_Key, deque[Call]] = defaultdict(deque)
        for rank, calls in enumerate(posted):
            for call in calls:
                self._queues[rank, "" if one_queue else call.communicator].append(call)
        self._begun = deque(self._queues)
        self._made: set[str] = set()
        #: By communicator: ranks that are in a call of all of them.
        self._together: dict[str, dict[int, _Key]] = defaultdict(dict)
        #: By communicator, kind, rank and peer: messages that nobody has met yet.
        self._unmet: dict[tuple[str, str, int, int], deque[tuple[Posted, _Key]]] = defaultdict(deque)
        self._left: dict[_Key, int] = {}
        self._operations = 0

    def run(self) -> int:
        while self._begun:
            self._begin(self._begun.popleft())
        stuck = {key: queue[0] for key, queue in self._queues.items() if queue}
        if stuck:
            raise BrokenRuleError(f"deadlock: {self._circle(stuck)}")
        return self._operations

    def _begin(self, key: _Key) -> None:
        """A call has come to the head of its queue."""
        call = self._queues[key][0]
        if call.communicator in self._made and call.messages:
            self._post(key, call)
            return
        here = self._together[call.communicator]
        here[key[0]] = key
        if len(here) < len(call.ranks):
            return
        del self._together[call.communicator]
        if call.communicator in self._made:
            self._collective(here)
        else:
            self._made.add(call.communicator)
            self._begun.extend(here.values())

    def _collective(self, here: dict[int, _Key]) -> None:
        calls = {rank: self._queues[key][0] for rank, key in here.items()}
        (rank, call), *others = calls.items()
        for other, its in others:
            if (its.collective, its.terms) != (call.collective, call.terms):
                raise BrokenRuleError(f"collective: rank {rank} calls {call}, rank {other} {its}")
        if call.sent:
            for source, giving in calls.items():
                for target, sent in zip(call.ranks, giving.sent, strict=True):
                    expected = calls[target].received[call.ranks.index(source)]
                    if sent != expected:
                        raise BrokenRuleError(
                            f"all-to-all: rank {source} sends {sent} elements to rank {target}, which "
                            f"expects {expected}, in {call}"
                        )
        for key in here.values():
            self._finish(key)

    def _post(self, key: _Key, call: Call) -> None:
        rank = key[0]
        self._left[key] = len(call.messages)
        for message in call.messages:
            theirs = "receive" if message.kind == "send" else "send"
            waiting = self._unmet[call.communicator, theirs, message.peer, rank]
            if not waiting:
                self._unmet[call.communicator, message.kind, rank, message.peer].append((message, key))
                continue
            other, its = waiting.popleft()
            if (message.count, message.dtype, message.tag) != (other.count, other.dtype, other.tag):
                raise BrokenRuleError(
                    f"message: {message} of rank {rank} meets {other} of rank {message.peer} on "
                    f"{call.communicator!r}"
                )
            for end in (key, its):
                self._left[end] -= 1
                if not self._left[end]:
                    self._finish(end)

    def _finish(self, key: _Key) -> None:
        self._operations += max(1, len(self._queues[key].popleft().messages))
        if self._queues[key]:
            self._begun.append(key)

    def _waits_for(self, key: _Key, call: Call) -> tuple[int, str]:
        """A rank that the head of a queue waits for, and in what."""
        rank = key[0]
        if key in self._together[call.communicator].values():
            missing = [peer for peer in call.ranks if peer not in self._together[call.communicator]]
            return missing[0], f"rank {rank} waits for rank {missing[0]} in {call}"
        unmet = (message for messages in self._unmet.values() for message, its in messages if its == key)
        message = next(unmet)
        return message.peer, f"rank {rank} waits for rank {message.peer} with {message} in {call}"

    def _circle(self, stuck: dict[_Key, Call]) -> str:
        """Who waits for whom, until it comes round or to a rank that has nothing left to post."""
        waits = {key[0]: self._waits_for(key, call) for key, call in stuck.items()}
        rank, seen, said = next(iter(waits)), set[int](), []
        while rank in waits and rank not in seen:
            seen.add(rank)
            rank, words = waits[rank]
            said.append(words)
        return "; ".join([*said, "and so on" if rank in seen else f"rank {rank} posts nothing more"])
