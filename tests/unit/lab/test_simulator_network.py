"""Links shared fairly, worked out by hand; the order on a wire; who waits for whom."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.lab.simulator.engine import Engine
from megatron_hexi.lab.simulator.fair_network import fair_rates
from megatron_hexi.lab.simulator.routes import Routes, RouteTable
from megatron_hexi.lab.simulator.unit_program import (
    FINISH,
    POINTS,
    Compute,
    LayerPass,
    Mark,
    PostBatch,
    StageProgram,
    Sum,
    UnitBatch,
    WaitForBatch,
)
from tests.support.costs import cluster
from tests.support.plans import examples

GB = 1e9


def rates(capacity, routes, loads=None):
    """Rates of transfers over the links of each route."""
    most = max(map(len, routes))
    links = np.full((len(routes), most), len(capacity))
    weights = np.zeros(links.shape)
    for number, route in enumerate(routes):
        links[number, : len(route)] = route
        weights[number, : len(route)] = loads[number] if loads else 1
    return list(fair_rates(links, weights, np.array([*capacity, np.inf], dtype=float)))


def test_two_on_one_link_have_half_each():
    assert rates([10], [[0], [0]]) == [5, 5]


def test_three_on_two_links():
    # The second link is the narrow one: 2 each; the first gives the rest to whom it has to itself.
    assert rates([10, 4], [[0], [0, 1], [1]]) == [8, 2, 2]
    # Now the first is: a third of it each would be less than half of the second.
    assert rates([6, 10], [[0], [0], [0, 1], [1]]) == [2, 2, 2, 8]


def test_counterparts_load_a_shared_link_twice():
    # Two GPUs of a unit send beside each other, and a third sender: a third of the link each.
    assert rates([12], [[0], [0]], [[2], [1]]) == [4, 4]
    assert rates([12, 5], [[0, 1], [0]], [[2, 1], [1]]) == [4, 4]
    assert rates([12, 3], [[0, 1], [0]], [[2, 1], [1]]) == [3, 6]


@given(
    st.lists(st.floats(1, 100), min_size=5, max_size=5),
    st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=12, max_size=12),
)
@examples(200)
def test_nobody_can_be_given_more(capacity, routes, width):
    loads = [[width[number]] * len(route) for number, route in enumerate(routes)]
    found = rates(capacity, [sorted(route) for route in routes], loads)
    used = [sum(found[n] * width[n] for n, route in enumerate(routes) if link in route) for link in range(5)]
    for link in range(5):
        assert used[link] <= capacity[link] * (1 + 1e-6)
    for number, route in enumerate(routes):
        # A full link on its way, on which nobody has more.
        assert any(
            used[link] >= capacity[link] * (1 - 1e-6)
            and found[number] >= max(found[n] for n, other in enumerate(routes) if link in other) * (1 - 1e-6)
            for link in route
        )


def test_routes_are_the_cluster_s():
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], bandwidth=10, latency=20, per="node")
    routes = Routes(known)
    numbers = routes.numbers(np.array([0, 1, 0]), np.array([2, 3, 1]), width=2)
    table = routes.table()
    # Both cross from a to b over the nodes' own links; the third stays inside.
    assert [table.own[number] for number in numbers] == [(0, 1), (0, 1), (2, 3)]
    assert table.names == ("a-0 network out", "b-0 network in", "a-0/0 port out", "a-0/1 port in")
    assert list(table.capacity) == [10 * GB, 10 * GB, 100 * GB, 100 * GB, np.inf]
    assert list(table.latency[numbers]) == [20e-6, 20e-6, 0]
    # Two counterparts on the node's link, each on its own port.
    assert list(table.alone[numbers]) == [5 * GB, 5 * GB, 100 * GB]


def run(capacity, messages, begins=None, latency=0.0):
    """Run messages (sender, receiver, bytes, links); each unit begins at its time and posts all at once."""
    units = 1 + max(max(message[:2]) for message in messages)
    begins = begins or [0.0] * units
    batches = [UnitBatch(unit, 0, "exchange", "keys", 1) for unit in range(units)]
    for number, (src, dst, _, _) in enumerate(messages):
        for unit in (src, dst):
            batches[unit].messages.append(number)
            batches[unit].left += 1
    return carry_out(
        [[Compute("token", "work", begins[b.unit]), PostBatch(b), WaitForBatch(b)] for b in batches],
        capacity,
        messages,
        [(batches[src], batches[dst]) for src, dst, _, _ in messages],
        latency,
    )


def carry_out(programs, capacity, messages, ends, latency=0.0):
    src, dst, size, routes = zip(*messages, strict=True)
    most = max(map(len, routes))
    links = np.full((len(routes), most), len(capacity))
    for number, route in enumerate(routes):
        links[number, : len(route)] = route
    capacities = np.array([*capacity, np.inf], dtype=float)
    table = RouteTable(
        names=tuple(f"link {n}" for n in range(len(capacity))),
        capacity=capacities,
        links=links,
        weights=(links < len(capacity)).astype(float),
        latency=np.full(len(routes), latency),
        alone=capacities[links].min(axis=1),
        own=tuple(map(tuple, routes)),
    )
    marked = [[*program, *(Mark(0, point) for point in range(len(POINTS)))] for program in programs]
    whole = np.zeros(len(messages), dtype=np.int64)
    program = StageProgram(
        marked,
        (LayerPass("forward", 0),),
        np.array(src),
        np.array(dst),
        np.array(size, float),
        np.arange(len(routes)),
        whole,
        ends,
    )
    log = Engine(program, table).run()
    return list(log.arrived), log


def test_who_stays_takes_over_what_is_freed():
    # 10 B/s for both until 2 s; then the larger one, with 10 of its 20 left, has all of it.
    arrived, _ = run([10], [(0, 1, 10, [0]), (2, 3, 20, [0])])
    assert arrived == pytest.approx([2, 3])


def test_who_comes_later_takes_half():
    # Alone for 1 s (10 of 20), half for 2 s; then the second has 20 of its 30 left.
    arrived, log = run([10], [(0, 1, 20, [0]), (2, 3, 30, [0])], begins=[0, 0, 1, 1])
    assert arrived == pytest.approx([3, 5])
    assert log.most_at_once == [2, 0]
    assert log.end == pytest.approx(5)


def test_three_transfers_on_two_links_to_the_end():
    # 8, 2, 2 B/s until the first is done at 1; then the second one's narrow link keeps it at 2 until 2 s.
    arrived, _ = run([10, 4], [(0, 1, 8, [0]), (2, 3, 4, [0, 1]), (4, 5, 10, [1])])
    assert arrived == pytest.approx([1, 2, 2 + 6 / 4])


def test_bytes_flow_a_latency_later():
    arrived, log = run([10], [(0, 1, 10, [0])], latency=0.5)
    assert arrived == pytest.approx([1.5])
    assert log.left[0] == 0
    network = [piece for piece in log.activities if piece.lane == "network"]
    assert [piece.end - piece.start for piece in network] == pytest.approx([1.5, 1.5])
    # While the second is on its way the first has the link to itself.
    arrived, _ = run([10], [(0, 1, 10, [0]), (2, 3, 10, [0])], begins=[0, 0, 0.5, 0], latency=0.5)
    assert arrived == pytest.approx([2.0, 2.5])


def test_a_message_leaves_when_both_ends_are_there():
    arrived, log = run([10], [(0, 1, 10, [0])], begins=[0.0, 3.0])
    assert arrived == pytest.approx([4])
    # Unit 0 waits from the start, and nothing of its own is under way until 3.
    (wait,) = [wait for wait in log.waits if wait.unit == 0]
    assert (wait.start, wait.end) == (0, pytest.approx(4))
    assert list(log.left) == [3]


def test_one_batch_at_a_time_on_a_wire():
    # Unit 0 posts a message to 1 and, behind it, one to 2, over different links.
    first = [UnitBatch(unit, 0, "exchange", "keys", 1, 0, [0], 1) for unit in (0, 1)]
    second = [UnitBatch(unit, 0, "exchange", "keys", 2, 0, [1], 1) for unit in (0, 2)]
    programs = [
        [PostBatch(first[0]), PostBatch(second[0]), WaitForBatch(first[0]), WaitForBatch(second[0])],
        [Compute("token", "late", 2.0), PostBatch(first[1]), WaitForBatch(first[1])],
        [PostBatch(second[1]), Compute("token", "other work", 3.0), WaitForBatch(second[1])],
    ]
    messages = [(0, 1, 10, [0]), (0, 2, 10, [1])]
    arrived, log = carry_out(programs, [10, 10], messages, [tuple(first), tuple(second)])
    # The second has its link to itself, and waits for the first all the same.
    assert arrived == pytest.approx([3, 4])
    assert list(log.marks[0, FINISH]) == pytest.approx([4, 3, 4])


def test_sums_inside_a_unit_take_their_time():
    batch = [UnitBatch(unit, 0, "exchange", "keys", 1, 0, [0], 1) for unit in (0, 1)]
    programs = [
        [Compute("token", "work", 1.0), Sum(2.0), PostBatch(batch[0]), WaitForBatch(batch[0])],
        [Compute("token", "work", 2.0), PostBatch(batch[1])],
    ]
    arrived, log = carry_out(programs, [10], [(0, 1, 10, [0])], [tuple(batch)])
    assert arrived == [4]
    sums = next(piece for piece in log.activities if piece.kind == "tensor_parallel")
    assert (sums.unit, sums.lane, sums.start, sums.end) == (0, "network", 1, 3)
    assert (log.waits[0].batch, log.waits[0].start, log.waits[0].end) == (None, 1, 3)


def test_who_waits_for_ever_is_a_fault_of_ours():
    batch = [UnitBatch(unit, 0, "exchange", "keys", 1, 0, [0], 1) for unit in (0, 1)]
    with pytest.raises(AssertionError, match=r"units \[0\] wait for ever"):
        carry_out(
            [[PostBatch(batch[0]), WaitForBatch(batch[0])], []], [10], [(0, 1, 10, [0])], [tuple(batch)]
        )


SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=6)


@given(SIZES, st.floats(1, 20), st.floats(0, 2))
@examples(100)
def test_a_link_is_never_faster_than_its_bytes(sizes, capacity, apart):
    # All over one link, beginning at different times: it is busy until the last byte, or idle in between.
    messages = [(2 * n, 2 * n + 1, size, [0]) for n, size in enumerate(sizes)]
    begins = [apart * (unit // 2) for unit in range(2 * len(sizes))]
    arrived, log = run([capacity], messages, begins)
    busy_until = 0.0
    for number, size in enumerate(sizes):
        busy_until = max(busy_until, apart * number) + size / capacity
    assert max(arrived) == pytest.approx(busy_until)
    assert log.end == pytest.approx(busy_until)
