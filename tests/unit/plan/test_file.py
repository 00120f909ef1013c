"""Plans as files: the same plan, the same bytes, the same digest; whole or not at all."""

import dataclasses
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.plan import (
    Domain,
    Estimate,
    Exchange,
    Group,
    Member,
    Plan,
    Provenance,
    Replica,
    Stage,
    Workload,
    dump_plan,
    plan_digest,
    proportional_plan,
    read_plan,
    validate_plan,
    write_plan,
)
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import YamlFile, read_yaml, spell_place
from tests.support.plans import examples, plans

NUMBERS = st.floats(0, 1e300)
#: Of anything that can be printed.
WORDS = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=12)


@st.composite
def annotated_plans(draw):
    """Any plan with whatever people are told beside it."""
    plan = draw(plans(most_ranks=4, most_replicas=3))
    optional = st.none() | NUMBERS
    estimate = Estimate(
        iteration_s=draw(optional),
        gap=draw(optional),
        memory_gib=draw(st.none() | st.lists(NUMBERS, max_size=3).map(tuple)),
        against=draw(st.none() | st.dictionaries(WORDS, NUMBERS, max_size=3)),
    )
    provenance = Provenance(planner=draw(st.none() | WORDS), seed=draw(st.none() | st.integers(0, 2**40)))
    replicas = tuple(
        dataclasses.replace(replica, micro_batches=draw(st.none() | st.integers(1, 99)))
        for replica in plan.replicas
    )
    return dataclasses.replace(
        plan,
        replicas=replicas,
        estimate=draw(st.none() | st.just(estimate)),
        provenance=draw(st.none() | st.just(provenance)),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("plans") / "plan.yaml"


PLAN = Plan(
    workload=Workload(64, 8, 4, 16, causal=True, layers=2, hidden_size=128, tensor_parallel=1),
    replicas=(
        Replica(
            (
                Stage(
                    (
                        Domain(
                            (
                                Group(
                                    ((0, 20), (44, 64)),
                                    (Member((0,), 25, (0, 5)), Member((1,), 15, (5, 8))),
                                    name="fast",
                                ),
                                Group(((20, 44),), (Member((2,), 24, (0, 8)),), name="slow"),
                            )
                        ),
                    )
                ),
            ),
            micro_batches=3,
        ),
    ),
    exchange=Exchange(window=2),
)


@given(annotated_plans())
@examples(120)
def test_what_is_written_is_read(path, plan):
    write_plan(plan, path)
    assert read_plan(path) == plan


@given(annotated_plans())
@examples(60)
def test_the_same_plan_gives_the_same_bytes(path, plan):
    write_plan(plan, path)
    first = path.read_bytes()
    write_plan(read_plan(path), path)
    assert path.read_bytes() == first


def test_a_rank_is_one_line_of_the_file():
    text = dump_plan(proportional_plan(Workload(2**20, 128, 8, 128), [[[1.0] * 8] * 4]))
    assert sum("ranks:" in line for line in text.splitlines()) == 32
    assert "- {ranks: [31], tokens: 32768, heads: [112, 128]}" in text
    assert max(map(len, text.splitlines())) <= 110


def test_fields_that_are_not_set_are_not_written():
    text = dump_plan(PLAN)
    assert text.startswith("version: 2\nworkload:\n")
    assert "estimate" not in text
    assert "null" not in text


# The digest.


@given(annotated_plans(), annotated_plans())
@examples(60)
def test_the_digest_ignores_what_people_are_told(plan, other):
    told = dataclasses.replace(plan, estimate=other.estimate, provenance=other.provenance)
    assert plan_digest(told) == plan_digest(plan)


#: The one follows from the members; the other is of a type of its own, and told apart below.
NOT_WRITTEN = (("workload", "tensor_parallel"), ("replicas", 0, "stages", 0, "exchange"))


def leaves(value, place=()):
    """Every value in nested dataclasses and tuples, with its place."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), (*place, field.name))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from leaves(item, (*place, i))
    else:
        yield place, value


def changed(value, place):
    """The same nested value, another leaf at the place."""
    if not place:
        if value is None or isinstance(value, bool):
            return not value
        return value + ("x" if isinstance(value, str) else 1)
    first, *rest = place
    if isinstance(first, int):
        return (*value[:first], changed(value[first], rest), *value[first + 1 :])
    if first == "experts" and isinstance(value, Member):
        return dataclasses.replace(value, experts=((0, 1),))
    return dataclasses.replace(value, **{first: changed(getattr(value, first), rest)})


@pytest.mark.parametrize(
    "place",
    [
        place
        for place, _ in leaves(PLAN)
        if place[0] not in ("estimate", "provenance") and place not in NOT_WRITTEN
    ],
    ids=spell_place,
)
def test_the_digest_tells_every_other_value_apart(place):
    assert plan_digest(changed(PLAN, place)) != plan_digest(PLAN)


def test_the_digest_tells_stages_apart_that_exchange_otherwise():
    stage = dataclasses.replace(PLAN.replicas[0].stages[0], exchange=PLAN.exchange)
    replica = dataclasses.replace(PLAN.replicas[0], stages=(stage,))
    assert plan_digest(dataclasses.replace(PLAN, replicas=(replica,))) != plan_digest(PLAN)


def test_the_digest_is_the_same_in_every_release():
    """Ranks with different releases compare digests: a change here needs another version of the format."""
    assert plan_digest(PLAN) == "63402ccde15c5580f26cf62085b74908c2775b39326d536396e382527798ef10"


# Writing.


def test_a_plan_that_breaks_a_rule_is_not_written(tmp_path):
    broken = changed(PLAN, ("replicas", 0, "stages", 0, "domains", 0, "groups", 0, "members", 0, "tokens"))
    with pytest.raises(
        PlanError, match=r"^replicas\[0\]\.stages\[0\]\.domains\[0\]\.groups\[0\]\.members hold 41 tokens"
    ):
        write_plan(broken, tmp_path / "plan.yaml")
    with pytest.raises(PlanError):
        validate_plan(broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["fchmod", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "plan.yaml"
    write_plan(PLAN, path)
    old = path.read_bytes()

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(
        HexiError, match=r"plan\.yaml: cannot be written \(No space left on device\); check the"
    ):
        write_plan(dataclasses.replace(PLAN, exchange=Exchange(7)), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    path.write_text("old")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_file_has_the_permissions_that_the_umask_leaves(tmp_path, mask, mode):
    path = tmp_path / "plan.yaml"
    before = os.umask(mask)
    try:
        write_plan(PLAN, path)
        assert os.umask(mask) == mask, "the umask is as it was"
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_folder_that_is_not_there_is_an_error_with_the_remedy(tmp_path):
    path = tmp_path / "nowhere" / "plan.yaml"
    with pytest.raises(HexiError) as caught:
        write_plan(PLAN, path)
    assert str(caught.value) == f"{path}: the folder {path.parent} is not there; make it first"


# Lines.


def test_every_place_knows_its_line(tmp_path):
    path = tmp_path / "plan.yaml"
    write_plan(PLAN, path)
    lines = path.read_text().splitlines()
    source = read_yaml(path)
    group = ("replicas", 0, "stages", 0, "domains", 0, "groups", 1)
    for place, text in {
        ("version",): "version: 2",
        ("workload", "head_dim"): "  head_dim: 16",
        (*group, "segments", 0, 1): "        segments:",
        (*group, "members", 0, "heads", 1): "        - {ranks: [2], tokens: 24, heads: [0, 8]}",
        ("exchange", "window"): "exchange: {window: 2}",
    }.items():
        assert lines[source.lines[place] - 1].startswith(text)


def test_a_place_that_is_absent_has_the_line_of_what_it_should_stand_in(tmp_path):
    source = YamlFile(tmp_path, None, {(): 1, ("a",): 3, ("a", 0): 4})
    assert source.where(("a", 0, "b")) == f"{tmp_path}:4: a[0].b"
    assert source.where(("a", 1)) == f"{tmp_path}:3: a[1]"
    assert source.where(("c", "d")) == f"{tmp_path}:1: c.d"
    assert source.where(()) == f"{tmp_path}:1"


def test_comments_and_other_styles_are_read_alike(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("# by hand\n" + dump_plan(PLAN).replace("seq_length: 64", "seq_length:   0x40  # 64"))
    assert read_plan(path) == PLAN
