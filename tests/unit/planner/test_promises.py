"""What the planner promises: never slower than Megatron's flags, nor than with more numbers fixed."""

import pytest

from tests.support.promises import broken, plan_case, random_promise

#: Of all cases, one that takes a few seconds.
QUICK = 17


def check(seed):
    case = random_promise(seed)
    found = plan_case(case)
    assert not broken(found), f"{broken(found)}\n{case.text}{case.job}\n{case.fixed}"
    return found


def test_plans_of_a_fleet_keep_the_promises():
    found = check(QUICK)
    assert sum(one.seconds is not None for one in found) > 1
    assert any(one.megatron_s is not None for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(60) if seed != QUICK])
def test_plans_of_sixty_fleets_keep_the_promises(seed):
    check(seed)
