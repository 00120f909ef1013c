"""A node loads of a copy what its ranks read: the rest stays where it is, and what comes is bit-equal."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_hexi.elastic.channel import SECRET_VARIABLE
from megatron_hexi.elastic.copies import COPIES_URL_VARIABLE, CopyBoard, FoundCopy
from megatron_hexi.elastic.copy_files import copy_folder, list_files, serve_files
from megatron_hexi.elastic.store import JOB_VARIABLE, STORE_VARIABLE
from megatron_hexi.elastic.training import loading
from megatron_hexi.elastic.training.loading import LoadedCopy
from megatron_hexi.patching import PatchSet

SECRET, ROUND = "0123456789abcdef" * 2, "0123abcd"
#: Bytes by which a tensor's range, an archive of torch's, is longer than the tensor.
AROUND = 2000


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Three nodes with a file of a checkpoint each: the round's store, the state, the copy, its files."""
    torch.manual_seed(0)
    state = {f"layers.{n}": torch.randn(100 + n, 50) for n in range(9)}
    whole = tmp_path / "whole"
    save(dict(state), storage_writer=FileSystemWriter(whole, thread_count=3), no_dist=True)
    files = list_files(whole)
    data = sorted(name for name in files if name.endswith(".distcp"))
    assert len(data) == 3
    held: dict[str, list[str]] = {}
    for number, name in enumerate(data):
        folder = tmp_path / f"node{number}"
        inside = copy_folder(folder, ROUND, 6)
        inside.mkdir(parents=True)
        url = f"localhost:{serve_files(folder, SECRET.encode())}"
        for file in (name, ".metadata"):
            shutil.copy(whole / file, inside)
            held.setdefault(file, []).append(url)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(STORE_VARIABLE, f"localhost:{store.port}")
    monkeypatch.setenv(JOB_VARIABLE, "job")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    patches = PatchSet(loading.LOAD_PATCHES)
    patches.install()
    yield store, state, FoundCopy(ROUND, 6, {name: (*files[name], held[name]) for name in held}), data
    patches.remove()


def loaded(monkeypatch, store, copy, folder, url, sizes):
    """Return the tensors that a rank of a node loads from the copy, and the folder that it reads from."""
    monkeypatch.setenv(COPIES_URL_VARIABLE, url)
    one = LoadedCopy(store, copy, folder)
    monkeypatch.setattr(loading, "_loaded", one)
    one.begin()
    got = {name: torch.zeros(size) for name, size in sizes.items()}
    load(got, storage_reader=FileSystemReader(one.folder), no_dist=True)
    return got, one.folder


def counted(store):
    return store.add("moved", 0), store.add("least", 0)


def test_only_what_is_read_comes_and_once_to_a_node(job, tmp_path, monkeypatch):
    store, state, copy, data = job
    url = copy.files[data[0]][2][0]
    reader = FileSystemReader(tmp_path / "whole")
    where = {index.fqn: info.relative_path for index, info in reader.read_metadata().storage_data.items()}
    own = [name for name in state if where[name] == data[0]]
    others = [name for name in state if where[name] != data[0]]
    assert len(own) > 1
    wanted = {name: state[name].shape for name in (*own, *others[:2])}
    for _ in range(2):  # two ranks
        got, _ = loaded(monkeypatch, store, copy, tmp_path / "node0", url, wanted)
        assert all(torch.equal(got[name], state[name]) for name in wanted)
    least = sum(4 * state[name].numel() for name in others[:2])
    assert counted(store)[1] == least
    assert least <= counted(store)[0] < least + 2 * AROUND


def test_a_node_that_comes_gets_the_description_whole(job, tmp_path, monkeypatch):
    store, state, copy, data = job
    got, folder = loaded(
        monkeypatch, store, copy, tmp_path / "new", "new:1", {"layers.7": state["layers.7"].shape}
    )
    assert torch.equal(got["layers.7"], state["layers.7"])
    moved, least = counted(store)
    assert least == 4 * state["layers.7"].numel()
    assert moved - copy.files[".metadata"][0] < least + AROUND
    assert not [path for path in folder.iterdir() if path.name in data]


def test_a_rank_that_gets_no_range_ends_and_the_copy_is_not_taken_again(job, tmp_path, monkeypatch):
    store, state, copy, _ = job

    def end(reason):
        raise SystemExit(reason)

    monkeypatch.setattr(loading, "end_to_start_again", end)
    files = {name: (*file[:2], ["localhost:1"]) for name, file in copy.files.items() if name != ".metadata"}
    gone = FoundCopy(ROUND, 6, {**copy.files, **files})
    with pytest.raises(CheckpointException, match="the copy of iteration 6 cannot be had: __0_"):
        loaded(monkeypatch, store, gone, tmp_path / "new", "new:1", {"layers.0": state["layers.0"].shape})
    job_store = dist.PrefixStore("hexi.job", store)
    job_store.set(f"copies/{ROUND}/6/all", "{}")
    assert CopyBoard(job_store, ROUND).find(6, []) is None
