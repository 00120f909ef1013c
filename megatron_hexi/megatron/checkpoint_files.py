"""Files of checkpoints are read without running what they say, and the error names why one cannot be read.

A torch_dist checkpoint's ``.metadata`` is a pickle, and so is all of it that is no tensor. torch and Megatron
call whatever these name, which is ``os.system`` in a checkpoint that was made for it.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_hexi.patching import patched

#: What ``.metadata`` may name, beside torch's data types.
_ALLOWED = {
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
}
#: How torch says that an object names what it does not allow.
_FOREIGN = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module \S+ is blocked)")
#: Errors of Megatron and torch where a file of a checkpoint is missing, truncated or of another kind.
_UNREADABLE = (EOFError, OSError, pickle.UnpicklingError, zipfile.BadZipFile, json.JSONDecodeError)
#: Text in their messages that tells damaged files from weights of another model.
_DAMAGED = re.compile(
    "PytorchStreamReader|Ran out of input|central directory|unpickl|corrupt|"
    "checkpoint state_dict: args|is not a distributed checkpoint",
    re.IGNORECASE,
)


def lacks(folder: Path) -> str | None:
    """Return what is wrong with the small files of a torch_dist checkpoint; ``None`` in other formats."""
    config = folder / "metadata.json"
    if not config.is_file():
        return None
    try:
        is_config = isinstance(json.loads(config.read_bytes()), dict)
    except ValueError:
        is_config = False
    if not is_config:
        return "its metadata.json is damaged"
    return None if (folder / ".metadata").is_file() else "its .metadata is missing"


def first_problem(problem: BaseException) -> BaseException:
    """Return the error of the first rank that failed, of an error that torch gathers from several."""
    while isinstance(problem, CheckpointException):
        problem = next(iter(problem.failures.values()))[0]
    return problem


def why_unreadable(problem: BaseException) -> str | None:
    """Return why a file of a checkpoint cannot be read; ``None`` where an error has another cause."""
    # Imported late: Megatron is imported after the CPU platform is installed.
    from megatron.core.dist_checkpointing.core import CheckpointingException

    problem = first_problem(problem)
    text = " ".join(str(problem).split())
    if foreign := _FOREIGN.search(text):
        return (
            f"a file of it names {foreign[1]}, which is no part of a checkpoint and may do harm; load none "
            "from a source that you do not trust"
        )
    is_checkpoints = isinstance(problem, (CheckpointingException, RuntimeError, AssertionError, KeyError))
    if isinstance(problem, _UNREADABLE) or (is_checkpoints and _DAMAGED.search(text)):
        why = text.rpartition("WeightsUnpickler error: ")[2].partition(" Check the documentation")[0][:300]
        return f"a file of it is damaged or missing ({f'{type(problem).__name__}: {why}'.removesuffix(': ')})"
    return None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} was not an allowed global")
        return super().find_class(module, name)


def _read_metadata(stream: BinaryIO) -> Metadata:
    """Return the metadata of a checkpoint.

    Raises:
        pickle.UnpicklingError: it names what is no part of metadata, or a file that is not beside it.
        Exception: it is damaged, or something else: any error that a pickle can end in.
    """
    metadata = _MetadataUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(
            f".metadata: holds a {type(metadata).__name__}, not the metadata of torch.distributed.checkpoint"
        )
    for file in {str(info.relative_path) for info in metadata.storage_data.values()}:
        if Path(file).name != file:
            raise pickle.UnpicklingError(f"GLOBAL {file} was not an allowed global")
    return metadata


@patched(
    "torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata",
    why="reads a checkpoint's metadata without running what they name",
    package="torch",
    versions=">=2.11",
)
def _by_allowed_names(original: Callable[..., Metadata], self: Any, *args: Any, **kwargs: Any) -> Metadata:
    with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
        try:
            metadata = _read_metadata(stream)
        except Exception as problem:  # torch would look for other metadata after any but its own error
            error = pickle.UnpicklingError(str(problem))
            raise CheckpointException("metadata", {0: _wrap_exception(error)}) from None
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


@patched(
    "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
    why="reads objects of a checkpoint without running what they name",
    package="torch",
    versions=">=2.11",
)
def _checked_object(original: Callable[..., None], self: Any, read_item: Any, value: io.BytesIO) -> None:
    # By the lists of torch and Megatron, whatever the environment says; the original takes any name.
    torch.load(value, map_location="cpu", weights_only=True)
    value.seek(0)
    original(self, read_item, value)


CHECKPOINT_FILE_PATCHES = (_by_allowed_names, _checked_object)
