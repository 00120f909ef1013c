"""What a rank posts to torch.distributed, seen where torch hands it to a process group.

`Posting` is a mode: inside it every operation of a process group is noted, whoever calls it, and carried out.
Whether a reduction adds up or takes the largest is not noted: torch hands that on as an opaque object.
With the groups made here, which only say that they communicate, one process can be one rank after another.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.support.nccl_rules import Call, Posted

_MESSAGES = {"send": "send", "recv_": "receive"}
#: What only the root says.
_OF_ROOT = {"gather_": "output_tensors", "scatter_": "input_tensors"}


class Posting(TorchDispatchMode):
    """Notes what is posted inside of it, in `calls`.

    Args:
        alone: whether groups are those of `fake_group`.
    """

    def __init__(self, *, alone: bool = False) -> None:
        super().__init__()
        self._alone = alone
        self.calls: list[Call] = []
        self._batch: list[Posted] | None = None
        self._patch = mock.patch.object(dist, "batch_isend_irecv", self._in_batch(dist.batch_isend_irecv))

    def __enter__(self) -> Self:
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema, args)
            if self._alone and func is torch.ops.c10d.alltoall_base_.default:
                return FakeWork().boxed()  # a fake group wants as much sent as received
        return func(*args, **(kwargs or {}))

    def _in_batch(self, original: Any) -> Any:
        def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
            self._batch = []
            works: list[dist.Work] = original(operations)
            group = operations[0].group
            self.calls.append(Call(*_communicator(group), messages=tuple(self._batch)))
            self._batch = None
            return works

        return batch_isend_irecv

    def _note(self, schema: Any, args: Sequence[Any]) -> None:
        name = schema.name.removeprefix("c10d::")
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        group = dist.ProcessGroup.unbox(given.pop("process_group"))
        communicator, ranks = _communicator(group)
        if name in _MESSAGES:
            (tensor,) = given["tensors"]
            peer = ranks[given["dst" if name == "send" else "src"]]
            message = Posted(_MESSAGES[name], peer, tensor.numel(), _dtype(tensor), given["tag"])
            if self._batch is not None:
                self._batch.append(message)
                return
            pair = tuple(sorted((peer, dist.get_process_group_ranks(group)[group.rank()])))
            self.calls.append(Call(f"{communicator}, {pair[0]} and {pair[1]}", pair, (message,)))
        elif name == "alltoall_base_":
            splits = [
                _elements(given[tensor], given[sizes], len(ranks))
                for tensor, sizes in (("input", "input_split_sizes"), ("output", "output_split_sizes"))
            ]
            self.calls.append(Call(communicator, ranks, (), name, _dtype(given["input"]), *splits))
        else:
            given.pop(_OF_ROOT.get(name, ""), None)
            tensors = [
                value for value in tree_flatten(list(given.values()))[0] if isinstance(value, torch.Tensor)
            ]
            terms = [f"{tensor.numel()} {_dtype(tensor)}" for tensor in tensors]
            terms += [f"root {given['root_rank']}"] if "root_rank" in given else []
            self.calls.append(Call(communicator, ranks, (), name, ", ".join(terms)))


def fake_group(rank: int, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """This rank's end of a group in which nothing is sent; an all-gather gives back what was put in."""
    group = dist.ProcessGroup(dist.HashStore(), ranks.index(rank), len(ranks))
    backend = FakeProcessGroup._create_internal(ranks.index(rank), len(ranks))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)  # type: ignore[arg-type]
    # What torch asks of a group that it made itself.
    distributed_c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
    return group


@contextlib.contextmanager
def fake_groups() -> Iterator[None]:
    """Forgets at the end the groups that were made inside."""
    known = distributed_c10d._world.pg_group_ranks
    before = set(known)
    try:
        yield
    finally:
        for group in set(known) - before:
            del known[group]


def _communicator(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
    return group.group_name, tuple(dist.get_process_group_ranks(group))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _elements(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Elements for each rank, of splits that count rows; without splits they are equal."""
    row = math.prod(tensor.shape[1:])
    return tuple(split * row for split in splits) or (tensor.numel() // ranks,) * ranks
