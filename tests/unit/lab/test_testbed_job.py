"""A job on the testbed: its lab on disk, and what is said when it fails."""

from __future__ import annotations

from megatron_hexi.cluster import read_cluster
from megatron_hexi.lab.testbed.job import Ended, _explain
from megatron_hexi.lab.testbed.lab import Lab, Quota, read_lab, write_lab
from tests.support.testbed import pair


def test_a_lab_comes_back_from_its_file(tmp_path):
    lab = Lab(tmp_path, "quota", True, "root", (0, 2), (Quota("/sys/fs/cgroup/x", 1, 0.5),), ("-m", "x"))
    write_lab(lab)
    assert read_lab(tmp_path) == lab


def test_the_rank_that_failed_first_is_named(tmp_path):
    (tmp_path / "pair.yaml").write_text(pair(gpus=2))
    cluster = read_cluster(tmp_path / "pair.yaml")
    lab = Lab(tmp_path, "none", True, "root", (0, 2), (), ("x",))
    lab.log("job", 1).write_text("a\nValueError: why\n")
    records: list = [{"exit_code": 1, "ended": 2.0}, {"exit_code": 7, "ended": 1.0}]
    ended = _explain(lab, cluster, "job", records, shown=[])
    assert (ended.code, ended.failure.splitlines()[-1]) == (7, "ValueError: why")
    assert "rank 1 (slow-0/0) ended with exit code 7" in ended.failure
    records[1] |= {"out_of_memory": True, "memory_limit": 5}
    assert (
        "rank 1 (slow-0/0) is out of memory: core has 4 GiB"
        in _explain(lab, cluster, "job", records, []).failure
    )
    assert isinstance(_explain(lab, cluster, "job", [None, None], []), Ended)
