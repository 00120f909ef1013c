"""A copy of the state in memory as the ranks of a round load it.

Files that this node holds are read in place. Of the others, the agents that hold them send the ranges that
the load plan of a rank names, once to each node. docs/surviving.md
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_hexi.elastic import say
from megatron_hexi.elastic.channel import secret_of_rank
from megatron_hexi.elastic.copies import (
    COPIES_OFF,
    COPIES_URL_VARIABLE,
    CopyBoard,
    FoundCopy,
    copies_folder,
    find_newest,
)
from megatron_hexi.elastic.copy_files import copy_path, pull, pull_ranges, range_name
from megatron_hexi.elastic.store import whole_store
from megatron_hexi.elastic.training.fencing import end_to_start_again
from megatron_hexi.patching import patched
from megatron_hexi.text_file import write_text_atomically

#: File with the newest checkpoint's iteration, which Megatron writes last into a folder of checkpoints.
TRACKER = "latest_checkpointed_iteration.txt"
_FETCH = timedelta(seconds=600)
#: Keys of a round: bytes that nodes have sent each other to load, and the least that would have done.
_MOVED, _LEAST = "moved", "least"


def find_copy(job: dist.Store, urls: list[str], checkpoint: int | None) -> dict[str, Any] | None:
    """Return the newest copy that the nodes hold, if it is newer than the checkpoint; called by rank 0.

    Args:
        urls: URL of the copies of each node.
        checkpoint: iteration of the newest checkpoint; ``None``: there is none.

    Returns:
        The arguments of `FoundCopy`; ``None``: there is no such copy.
    """
    if job.check([COPIES_OFF]):
        say(f"no copies any more: {job.get(COPIES_OFF).decode()}")
        return None
    newest = find_newest(job, urls)
    if newest is None or newest.iteration <= (checkpoint or 0):
        return None
    return {"name": newest.name, "iteration": newest.iteration, "files": dict(newest.files)}


class LoadedCopy:
    """The copy that a rank loads from.

    Args:
        store: the round's.
    """

    def __init__(self, store: dist.Store, copy: FoundCopy, copies: Path) -> None:
        self._store, self._copy = store, copy
        self._path = copy_path(copy.name, copy.iteration)
        self.folder = copies.joinpath(*self._path)
        url = os.environ[COPIES_URL_VARIABLE]
        self._lacked = {name: file for name, file in copy.files.items() if url not in file[2]}

    def begin(self) -> None:
        """Download the small files, which describe the others; called by one rank of each node.

        Raises:
            OSError: a file cannot be downloaded, or there is no room for it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, (size, digest, urls) in self._lacked.items():
            if not name.endswith(".distcp"):
                pull(urls, self._path, name, (size, digest), self.folder, secret_of_rank())
                self._store.add(_MOVED, size)
        write_text_atomically(self.folder.parent / TRACKER, str(self._copy.iteration))

    def fetch(self, items: list[Any], stored: dict[Any, Any], tensors: dict[str, Any]) -> dict[Any, Any]:
        """Download what a load plan reads and this node lacks; end this rank if that cannot be had.

        Args:
            items: `ReadItem`s of torch.distributed.checkpoint.
            stored: file, offset and length of each chunk, by its index.
            tensors: metadata of each tensor, by its name.

        Returns:
            `stored`, with the files that hold the ranges here.
        """
        boxes: dict[str, dict[str, tuple[int, int, int]]] = defaultdict(dict)
        here = dict(stored)
        for item in items:
            index, info = item.storage_index, stored[item.storage_index]
            if (file := info.relative_path) in self._lacked:
                least, tensor = info.length, tensors[index.fqn]
                if hasattr(tensor, "properties"):  # else an object, of which all is read
                    least = min(least, math.prod(item.lengths) * tensor.properties.dtype.itemsize)
                box = f"{info.offset} {tuple(item.storage_offsets)} {tuple(item.lengths)}"
                boxes[file][box] = info.offset, info.length, least
                here[index] = replace(info, relative_path=range_name(file, info.offset), offset=0)
        for file, needed in boxes.items():
            try:
                moved, least = pull_ranges(
                    self._lacked[file][2], self._path, file, needed, self.folder, secret_of_rank()
                )
            except OSError as problem:
                CopyBoard(whole_store(), self._copy.name).tell_lost(self._copy.iteration)
                end_to_start_again(f"the copy of iteration {self._copy.iteration} cannot be had: {problem}")
            self._store.add(_MOVED, moved)
            self._store.add(_LEAST, least)
        return here


_loaded: LoadedCopy | None = None


def fetch_copy(store: dist.Store, chosen: dict[str, Any]) -> Path | None:
    """Begin to load a copy; called by all started ranks, with the same result on each.

    Returns:
        The folder to load from; ``None``: a node could not begin, so the checkpoint is loaded.
    """
    global _loaded
    copies = copies_folder()
    assert copies is not None, "agents of a job have the same options"
    node, nodes = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    _loaded = LoadedCopy(store, FoundCopy(chosen["name"], chosen["iteration"], chosen["files"]), copies)
    if os.environ["LOCAL_RANK"] == "0":
        problem = ""
        try:
            _loaded.begin()
        except (OSError, RuntimeError) as caught:
            problem = str(caught)
            say(f"the copy of iteration {chosen['iteration']} cannot be had: {problem}; takes the checkpoint")
        store.set(f"fetched/{node}", problem)
    keys = [f"fetched/{number}" for number in range(nodes)]
    store.wait(keys, _FETCH)
    return None if any(store.multi_get(keys)) else _loaded.folder.parent


def moved_words(store: dist.Store) -> str:
    """Return how much nodes have sent each other to load a copy, for the log; empty where none is loaded."""
    if _loaded is None:
        return ""
    moved, least = (store.add(key, 0) / 1e6 for key in (_MOVED, _LEAST))
    return f"; {moved:.3f} MB of the state came from other nodes, of {least:.3f} MB that had to"


@patched(
    "torch.distributed.checkpoint.filesystem:FileSystemReader.read_data",
    why="of a copy in the memory of nodes, downloads what a rank reads, under megatron_hexi.elastic",
    package="torch",
    versions=">=2.11",
)
def _from_nodes(original: Callable[..., Any], self: Any, plan: Any, planner: Any) -> Any:
    if _loaded is not None and Path(self.path) == _loaded.folder:
        tensors = planner.metadata.state_dict_metadata
        self.storage_data = _loaded.fetch(plan.items, self.storage_data, tensors)
    return original(self, plan, planner)


LOAD_PATCHES = (_from_nodes,)
