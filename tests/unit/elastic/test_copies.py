"""Copies of the state in the memory of nodes: who holds what, and what survives the loss of a node."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import string
import time
from contextlib import ExitStack

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hexi.elastic import copies as copies_module
from megatron_hexi.elastic.channel import connect
from megatron_hexi.elastic.copies import CopyBoard, find_newest
from megatron_hexi.elastic.copy_files import (
    bare_name,
    copy_folder,
    copy_path,
    list_files,
    pull,
    pull_ranges,
    range_name,
    serve_files,
)
from megatron_hexi.elastic.launcher import keeper as keeping
from megatron_hexi.elastic.launcher.keeper import Keeper
from megatron_hexi.elastic.store import DECISION, TRAINING
from tests.support.plans import examples

ROUND = "0123abcd"
SECRET = b"known to the job's nodes alone"


class Nodes:
    """Nodes on this machine, with what ranks would have written."""

    def __init__(self, folder, stack, count):
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.store, self.job = store, dist.PrefixStore("job", store)
        self.board = CopyBoard(self.job, ROUND)
        self.keepers = []
        for node in range(count):
            parent = folder / f"node{node}"
            parent.mkdir()
            keeper = Keeper(parent, ("localhost", store.port), "job", "localhost", SECRET)
            self.keepers.append(stack.enter_context(keeper))
            keeper.begin_round(ROUND, node)

    def write(self, iteration):
        for node, keeper in enumerate(self.keepers):
            folder = self.folder(keeper, iteration)
            folder.mkdir(parents=True)
            (folder / f"__{node}_0.distcp").write_bytes(bytes([node, iteration]) * 1000)
            if node == 0:
                (folder / ".metadata").write_text(f"of {iteration}")
        self.board.announce(iteration, len(self.keepers))

    def folder(self, keeper, iteration):
        return copy_folder(keeper.folder, ROUND, iteration)

    def wait_until_safe(self, iteration):
        deadline = time.monotonic() + 20
        while self.board.safe() != iteration:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def found(self, *nodes):
        """The iteration of the newest copy that these nodes hold."""
        found = find_newest(self.job, self.urls(*nodes))
        return None if found is None else found.iteration

    def urls(self, *nodes):
        return [self.keepers[node].url for node in nodes]


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "_LOOK_S", 0.01)
    monkeypatch.setattr(copies_module, "_SAID_S", 0.1)
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack, 4)


def test_any_node_may_go_and_not_two_neighbours(nodes):
    nodes.write(6)
    nodes.wait_until_safe(6)
    for lost in range(4):
        present = [node for node in range(4) if node != lost]
        assert nodes.found(*present) == 6
    assert nodes.found(0, 2) == 6
    assert nodes.found(0, 3) is None


def test_a_copy_that_could_not_be_loaded_is_not_found_again(nodes):
    nodes.write(6)
    nodes.wait_until_safe(6)
    nodes.board.tell_lost(6)
    assert nodes.found(0, 1, 2, 3) is None


def test_after_a_failure_the_loaded_copy_is_on_two_nodes_again(nodes):
    """Node 3 is gone, so the files of 2 and of 3 are on one node each; then 2 or 0 may go as well."""
    nodes.write(6)
    nodes.wait_until_safe(6)
    found = find_newest(nodes.job, urls := nodes.urls(0, 1, 2))
    assert found is not None
    copy = {"name": ROUND, "iteration": 6, "files": found.files}
    round_ = dist.PrefixStore("second", nodes.store)
    round_.set(DECISION, json.dumps({"copy": copy, "urls": urls}))
    for number in (0, 1, 2):
        nodes.keepers[number].begin_round("second", number)
    time.sleep(0.1)
    assert nodes.found(1, 2) is None  # ranks load, and nothing else uses the network
    round_.set(TRAINING, "")
    deadline = time.monotonic() + 20
    while not all(nodes.found(*two) == 6 for two in ((0, 1), (0, 2), (1, 2))):
        assert time.monotonic() < deadline
    whole = {name: file[:2] for name, file in found.files.items()}
    assert all(list_files(nodes.folder(keeper, 6)).items() <= whole.items() for keeper in nodes.keepers)


def test_a_copy_that_is_on_its_way_leaves_the_one_before(nodes):
    nodes.write(6)
    nodes.wait_until_safe(6)
    nodes.keepers[3].begin_round("another", 3)  # as if the node were gone
    nodes.write(8)
    assert nodes.found(0, 1, 2) == 6
    nodes.keepers[3].begin_round(ROUND, 3)
    nodes.wait_until_safe(8)
    assert nodes.found(0, 1, 2) == 8


def test_older_copies_go_and_memory_is_given_back(nodes):
    for iteration in (2, 4, 6):
        nodes.write(iteration)
        nodes.wait_until_safe(iteration)
    deadline = time.monotonic() + 20
    while any(nodes.folder(keeper, 4).exists() for keeper in nodes.keepers):
        assert time.monotonic() < deadline
    for keeper in nodes.keepers:
        assert [path.name for path in (keeper.folder / ROUND).iterdir()] == ["iter_0000006"]
        keeper.__exit__()
        assert not keeper.folder.exists()


def test_what_a_killed_agent_has_left_goes_at_the_next_start(tmp_path):
    left = tmp_path / "hexi-copies-x"
    left.mkdir()
    (left / "lock").touch()
    with Keeper(tmp_path, ("localhost", 1), "job", "localhost", SECRET) as one:
        assert not left.exists()
        with Keeper(tmp_path, ("localhost", 1), "job", "localhost", SECRET):
            assert one.folder.exists()


def test_an_agent_that_starts_sweeps_no_folder_that_another_is_making(tmp_path, monkeypatch):
    """Another agent starts at the worst moments: before each lock, and after it."""
    lock_file = fcntl.flock

    def flock(lock, kind):
        if kind == fcntl.LOCK_EX:
            keeping._sweep(tmp_path)
        lock_file(lock, kind)
        if kind == fcntl.LOCK_EX:
            keeping._sweep(tmp_path)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Keeper(tmp_path, ("localhost", 1), "job", "localhost", SECRET) as one:
        keeping._sweep(tmp_path)
        assert (one.folder / "lock").exists()
        assert list(tmp_path.iterdir()) == [one.folder]


PATH = copy_path(ROUND, 6)


def served(folder):
    """A folder of copies with one copy, in which files may be written, and where it is served."""
    inside = copy_folder(folder, ROUND, 6)
    inside.mkdir(parents=True)
    return inside, f"localhost:{serve_files(folder, SECRET)}"


def test_other_bytes_are_not_taken(tmp_path):
    source, url = served(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    (source / "a").write_text("right")
    wanted = list_files(source)["a"]
    for other in ("wrong", ""):
        (source / "a").write_text(other)
        with pytest.raises(OSError, match="has other bytes"):
            pull([url], PATH, "a", wanted, target, SECRET)
    with pytest.raises(OSError, match="it has no such file"):
        pull([url], PATH, "b", wanted, target, SECRET)
    assert not list(target.iterdir())
    (source / "a").write_text("right")
    pull(["localhost:1", url], PATH, "a", wanted, target, SECRET)
    assert list_files(target) == {"a": wanted}


def test_ranges_of_a_file_come_once_to_each_node(tmp_path):
    source, url = served(tmp_path / "source")
    (source / "a").write_bytes(bytes(range(100)))
    target = tmp_path / "target"
    target.mkdir()
    first = {"rows 0": (10, 20, 8), "rows 1": (10, 20, 12)}
    assert pull_ranges(["localhost:1", url], PATH, "a", first, target, SECRET) == (20, 20)
    # Another rank of the node.
    assert pull_ranges([url], PATH, "a", first | {"all": (90, 10, 9)}, target, SECRET) == (10, 9)
    assert (target / range_name("a", 10)).read_bytes() == bytes(range(10, 30))
    assert (target / range_name("a", 90)).read_bytes() == bytes(range(90, 100))
    for beyond in ((95, 10, 1), (-1, 10, 1), (10**30, 10, 1)):
        with pytest.raises(OSError, match="a: localhost"):
            pull_ranges([url], PATH, "a", {"beyond": beyond}, target, SECRET)
    assert not [path for path in target.iterdir() if "95" in path.name and ".part" not in path.name]


def test_without_a_copy_nothing_is_found():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert find_newest(dist.PrefixStore("job", store), ["localhost:1"]) is None


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../up", "a/b", "..", ".", "", ".bashrc", "a\\b", "a\0b", "a\nb", "%2e%2e", "file name"],
)
def test_only_bare_names_are_fetched(name, tmp_path):
    source, url = served(tmp_path / "source")
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    (source / "plain").write_bytes(b"bytes")
    (wanted,) = list_files(source).values()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="no bare name of a file"):
        pull([url], PATH, name, wanted, target, SECRET)
    with pytest.raises(OSError, match="no bare name of a file"):
        pull([url], (name, PATH[1]), "plain", wanted, target, SECRET)
    with pytest.raises(OSError, match="no bare name of a file"):
        copy_folder(tmp_path, name, 1)
    assert sorted(tmp_path.rglob("*")) == before
    pull([url], PATH, "plain", wanted, target, SECRET)


@given(st.text(max_size=40) | st.text("./\\~\0%a-", max_size=12))
@example("a" * 201)
@example("a\n")
@example("\N{FULLWIDTH SOLIDUS}")
def test_a_name_is_a_plain_file_s_or_refused(name):
    """A name that is taken leads nowhere but into its folder: letters, digits and -_. only."""
    try:
        taken = bare_name(name)
    except OSError:
        return
    assert taken == name
    assert len(name) <= 200
    assert set(name) <= {*string.ascii_letters, *string.digits, *"_.-"}
    assert name == ".metadata" or name[0] not in ".-"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A folder of copies with a secret beside it and behind links: where it is served, and its files."""
    root = tmp_path_factory.mktemp("crowded")
    inside, url = served(root / "copies")
    (root / "outside").write_bytes(b"bytes")
    (inside / "plain").write_bytes(b"bytes")
    (inside / "link").symlink_to(root / "outside")
    (root / "copies" / "folder").symlink_to(root)
    return url, {f"{ROUND}/{inside.name}/plain"}


PARTS = st.sampled_from(
    ["", ".", "..", "%2e%2e", ROUND, PATH[1], "plain", "link", "folder", "outside", "\\", "~", "a", "?", "#"]
)


@given(st.lists(PARTS, max_size=7).map("/".join))
@example(f"{ROUND}/{PATH[1]}/plain")
@example(f"{ROUND}/{PATH[1]}/link")
@example("folder/copies/outside")
@example("\0/\0/\udcff" * 400)
@examples(50)
def test_a_server_of_copies_serves_its_files_only(crowded, path):
    url, files = crowded
    host, _, port = url.partition(":")
    answer = b""
    with connect((host, int(port)), SECRET, 20) as connection:
        connection.sendall(f"{path} 1 9\n".encode(errors="surrogateescape"))
        with contextlib.suppress(ConnectionResetError):  # of a line that is longer than any right one
            answer = connection.makefile("rb").read()
    assert answer == (b"+ytes" if path in files else b"")


def test_copies_come_from_nodes_only(tmp_path):
    (tmp_path / "secret").write_bytes(b"bytes")
    wanted = list_files(tmp_path)["secret"]
    for url in (f"file://{tmp_path}", "localhost", "localhost:http", ":80"):
        with pytest.raises(OSError, match="is no node's address"):
            pull([url], PATH, "secret", wanted, tmp_path, SECRET)


def test_what_a_stranger_names_in_the_store_is_written_nowhere(nodes, tmp_path, capfd):
    """A fifth node, the one before the first, has written a file with the name of one elsewhere."""
    stranger, url = served(tmp_path / "stranger")
    (stranger / "outside").write_bytes(b"bytes")
    (wanted,) = list_files(stranger).values()
    name = f"/../../../../{tmp_path.name}/outside"
    nodes.write(6)
    nodes.wait_until_safe(6)
    nodes.board.tell_own(7, 4, url, {name: wanted})
    nodes.board.announce(7, 5)
    deadline = time.monotonic() + 20
    while nodes.board.owns(7, 5) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    said = ""
    while said.count("is no bare name of a file") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        said += capfd.readouterr().err
    assert nodes.board.safe() == 6
    # Each node tries again and again, has said it once, and goes on with what comes.
    time.sleep(0.2)
    assert not capfd.readouterr().err
    nodes.write(8)
    nodes.wait_until_safe(8)
    with pytest.raises(OSError, match="no bare name of a file"):
        pull_ranges([url], PATH, name, {"": (0, 1, 1)}, tmp_path, SECRET)
    assert [path.parent for path in tmp_path.rglob("outside*")] == [stranger]


def test_no_link_is_followed_in_the_folder_that_is_served(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"bytes")
    wanted = list_files(outside)["secret"]
    source, url = served(tmp_path / "source")
    (source / "plain").write_bytes(b"bytes")
    (source / "link").symlink_to(outside / "secret")
    (source.parent / "folder").symlink_to(outside)
    os.mkfifo(source / "pipe")
    assert list(list_files(source)) == ["plain"]
    pull([url], PATH, "plain", wanted, tmp_path, SECRET)
    for path, name in ((PATH, "link"), ((ROUND, "folder"), "secret"), (PATH, "pipe")):
        with pytest.raises(OSError, match="it has no such file"):
            pull([url], path, name, wanted, tmp_path, SECRET)
    through = tmp_path / "through"
    through.symlink_to(tmp_path / "source")
    pull([f"localhost:{serve_files(through, SECRET)}"], PATH, "plain", wanted, tmp_path, SECRET)


def test_no_link_is_written_through(tmp_path):
    """A link in the place of a fetched file, or of the folder for it, is replaced or refused."""
    source, url = served(tmp_path / "source")
    (source / "plain").write_bytes(b"bytes")
    (wanted,) = list_files(source).values()
    precious, target = tmp_path / "precious", tmp_path / "target"
    precious.write_bytes(b"mine")
    target.mkdir()
    (target / "plain").symlink_to(precious)
    pull([url], PATH, "plain", wanted, target, SECRET)
    assert precious.read_bytes() == b"mine"
    assert list_files(target) == {"plain": wanted}
    assert (target / "plain").stat().st_mode & 0o777 == 0o600
