"""A part of the golden values; `python -m tests.golden` compares all of them."""

from tests.golden import planner, plans, timings, values


def check(part, cases, value, relative):
    golden = values.read(part)
    found = [
        f"{name}{line}"
        for name, case in cases
        for line in values.differences(golden[name], value(case), relative)
    ]
    assert not found


def test_ranks_derive_the_same_from_plans():
    check("plans", plans.cases(20), plans.digests, 0.0)


def test_iterations_take_as_long():
    quick = ((name, case) for name, case in timings.cases(10) if not name.startswith("fleet-96"))
    check("timings", quick, timings.values, 1e-12)


def test_the_planner_finds_the_same_plan():
    quick = ((name, asked) for name, asked in planner.cases() if name == "c llama3-8b 8K 8")
    check("planner", quick, lambda asked: planner.values(*asked), 1e-12)


def test_a_value_that_differs_is_named():
    golden = values.plain({"losses": [1.0, 2.0], "steps": 3})
    found = values.plain({"losses": [1.0, 2.0 + 1e-9], "steps": 4})
    assert list(values.differences(golden, golden, 0.0)) == []
    lines = list(values.differences(golden, found, 0.0))
    assert [line.partition(":")[0] for line in lines] == [".losses[1]", ".steps"]
    assert [line.partition(":")[0] for line in values.differences(golden, found, 1e-6)] == [".steps"]
