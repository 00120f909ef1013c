"""What the planner promises: never slower than Megatron's flags, nor than with more numbers fixed."""

import pytest

from tests.support.promises import broken, plan_case, random_promise

#: Of all cases, those that take a few seconds together.
QUICK = (17, 19)


def check(seed):
    case = random_promise(seed)
    found = plan_case(case)
    assert not broken(found), f"{broken(found)}\n{case.text}{case.job}\n{case.fixed}"
    return found


def test_plans_of_some_fleets_keep_the_promises():
    found = [one for seed in QUICK for one in check(seed)]
    assert sum(one.seconds is not None for one in found) > 4
    assert sum(one.megatron_s is not None for one in found) > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(60) if seed not in QUICK])
def test_plans_of_sixty_fleets_keep_the_promises(seed):
    check(seed)
