"""``--hexi-replan-interval N``: the plan follows the cluster while the job runs.

Every N iterations each rank posts its times in the job's store; rank 0 hands them to the planner, a process
of its own (`replan.planning.advisor`), and goes on. When that has found a plan that is worth it, rank 0
orders a swap at an iteration that no rank has reached yet; there all agree on the digest and go on by a new
session. Weights and optimizer state stay where they are, and the process groups as well. A plan that moves
layers begins in a round of its own, under megatron_hexi.elastic.

No iteration ends before all ranks have added up their gradients. So what rank 0 wrote before it began
iteration n is there for every rank before it begins n + 1.
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_hexi.elastic.store import in_round
from megatron_hexi.elastic.training.round_plan import choose_plan, start_s, tell_speeds
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.megatron.progress import close_interval
from megatron_hexi.megatron.samplers import announce_share, batches_ahead, set_training
from megatron_hexi.megatron.session import Session, active_session, set_active_session
from megatron_hexi.megatron.step_times import METER
from megatron_hexi.options.kinds import is_packed
from megatron_hexi.patching import STEP_PARAMETERS, patched
from megatron_hexi.plan import Plan, dump_plan, plan_digest, plan_from_yaml
from megatron_hexi.replan.training.plan_swap import forget_positions, swapped_session, swapped_shares
from megatron_hexi.replan.training.planner_process import (
    PlannerConnection,
    job_document,
    may_move_shares,
    model_document,
)
from megatron_hexi.runtime import agree_on_plan, job_store, meeting
from megatron_hexi.yaml_file import yaml_from_text

#: Iterations between an order and its swap: one so that all ranks read it, one to spare.
_NOTICE = 2
#: What a swap takes until one was measured, seconds.
_SWAP_S = 0.1
#: A loss jumps if it leaves the median of the last so many by so many of their median deviations, and by more
#: than this part of it.
_LOSSES, _DEVIATIONS, _LEAST_JUMP = 20, 12.0, 0.2
_AGREEMENT = timedelta(seconds=60)


@dataclass(frozen=True)
class Order:
    """A command from rank 0 to swap plans, for all ranks."""

    number: int
    iteration: int
    plan: str
    final: bool = False


class Replanner:
    """Runs re-planning on one rank.

    Args:
        store: the job's store; a part of it that nothing else uses.
    """

    def __init__(self, store: dist.Store, args: Namespace, advice: Callable[[dict[str, Any]], Any]) -> None:
        self._store, self._args = store, args
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._interval: int = args.hexi_replan_interval
        self._orders = 0
        self._order: Order | None = None
        self._fresh = 0  # samples of the present plan start after its first, slower iteration
        self._iteration = 0
        self._losses: list[Tensor] = []
        self._usual: deque[float] = deque(maxlen=_LOSSES)
        self._swap_s = _SWAP_S
        # Rank 0 alone
        self._awaited: int | None = None
        self._told_plan: str | None = None
        self._previous: str | None = None
        self._watched_until = 0
        self._ended = self._told_speeds = False
        self._advice = advice(self._opening()) if self._rank == 0 else None

    def before_step(self, iteration: int) -> None:
        """Run re-planning's part before an iteration: read answers and orders, swap, report times.

        Raises:
            PlanError: ranks disagree on the plan that they were to swap to; on all of them.
        """
        self._iteration = iteration
        if self._rank == 0:
            self._lead(iteration)
        self._read_order()
        if self._order is not None and iteration >= self._order.iteration:
            self._carry_out(iteration, self._order)
        if iteration and iteration % self._interval == 0:
            self._report(iteration)

    def after_step(self, losses: Any) -> None:
        """Store the loss on ranks that have it: those of the last pipeline stage."""
        loss = losses.get("lm loss") if isinstance(losses, dict) else None
        if loss is not None:
            self._losses.append(loss.detach())

    # Every rank

    def _report(self, iteration: int) -> None:
        """Post this rank's times since the last report."""
        steps = METER.take_finished()
        fresh, self._fresh = self._fresh, 0
        busy = [step.seconds - sum(step.waited.values()) for step in steps[fresh:] if step.waited]
        losses, self._losses = [float(loss.flatten()[0]) for loss in self._losses], []
        document = {"iteration": iteration, "busy_s": busy, "losses": losses}
        self._store.set(f"times/{iteration}/{self._rank}", json.dumps(document))

    def _read_order(self) -> None:
        key = f"order/{self._orders}"
        if self._order is None and self._store.check([key]):
            self._order = Order(**json.loads(self._store.get(key)))
            session = _session()
            shares = swapped_shares(session, _plan(session, self._order.plan))
            if shares is not None:
                announce_share(self._order.iteration, shares[session.replica])

    def _carry_out(self, iteration: int, order: Order) -> None:
        """Swap to the ordered plan, together with all other ranks."""
        begin = time.perf_counter()
        session = _session()
        if iteration != order.iteration:
            raise HexiError(
                f"the plan of order {order.number} was due at iteration {order.iteration}, this rank is at "
                f"{iteration}; start the job again"
            )
        plan = _plan(session, order.plan)
        digest = plan_digest(plan)
        agree_on_plan(meeting(self._store), self._rank, self._ranks, digest, session.given.path, _AGREEMENT)
        close_interval(session)
        set_active_session(swapped_session(session, plan, iteration + 1))
        forget_positions()
        METER.take_finished()
        # Where few iterations are measured, the first after a swap is none of them.
        self._order, self._orders = None, self._orders + 1
        self._fresh = int(self._args.hexi_metrics_interval == 1)
        if self._rank == 0:
            self._swap_s = time.perf_counter() - begin
            self._told_plan = order.plan
            if in_round():
                choose_plan(order.plan)
            self._say(f"iteration {iteration}: swapped to plan {digest[:12]} in {1e3 * self._swap_s:.1f} ms")

    # Rank 0

    def _lead(self, iteration: int) -> None:
        assert self._advice is not None
        due = iteration - 1
        if due and due % self._interval == 0 and not self._ended:
            self._ask(due)
        answer = self._advice.hear()
        if answer is None:
            return
        if "error" in answer:
            raise HexiError(
                f"--hexi-replan-interval: {answer['error']} (from the planner); correct that, or leave it out"
            )
        elif "reason" in answer:
            self._decide(iteration, answer)

    def _ask(self, iteration: int) -> None:
        """Read the times that all ranks posted before the last iteration, and send them to the planner."""
        keys = [f"times/{iteration}/{rank}" for rank in range(self._ranks)]
        reports = [json.loads(report) for report in self._store.multi_get(keys)]
        for key in keys:
            self._store.delete_key(key)
        losses = max((report["losses"] for report in reports), key=len)
        if self._jumped(losses):
            return
        count = min(len(report["busy_s"]) for report in reports)
        rows = [[report["busy_s"][-count:][row] for report in reports] for row in range(count)]
        if rows and self._awaited is None and self._order is None:
            swapped_plan, self._told_plan = self._told_plan, None
            times = {"swap_s": self._swap_s, "start_s": start_s() if in_round() else None}
            self._advice.ask(  # type: ignore[union-attr]
                {"iteration": iteration, "busy_s": rows, "swapped": swapped_plan, **times}
            )
            self._awaited = iteration

    def _jumped(self, losses: list[float]) -> bool:
        """Return whether a loss has jumped since the last swap; if so, order a swap back."""
        usual = sorted(self._usual)
        if self._iteration > self._watched_until:
            self._previous = None
        if self._previous is not None and self._order is None and len(usual) >= 3:
            middle = statistics.median(usual)
            deviation = statistics.median(abs(loss - middle) for loss in usual)
            limit = middle + max(_DEVIATIONS * deviation, _LEAST_JUMP * abs(middle))
            worst = next((loss for loss in losses if not math.isfinite(loss) or loss > limit), None)
            if worst is not None:
                self._say(
                    f"the loss jumped from {middle:.4g} to {worst:.4g} after a swap: back to the plan "
                    "before, and no further swaps"
                )
                self._command(self._iteration, self._previous, final=True)
                return True
        self._usual.extend(losses)
        return False

    def _decide(self, iteration: int, answer: dict[str, Any]) -> None:
        self._awaited = None
        plan, reason = answer["plan"], answer["reason"]
        speeds = ", ".join(f"{rank}: {speed:.2f}" for rank, speed in enumerate(answer["speeds"]))
        numbers = (
            f"relative speeds {speeds or 'not known'}; "
            f"{'changed: rank ' + ', '.join(map(str, answer['changed'])) + '; ' if answer['changed'] else ''}"
            f"predicted {answer['present_s']:.4g} s per iteration, with another cut {answer['best_s']:.4g} s "
            f"(gain {answer['gain']:.1%})"
        )
        if answer.get("restart"):
            gain = 1 - answer["restart_s"] / answer["present_s"]
            numbers += (
                f"; started again with {answer['restart']} layers in its stages {answer['restart_s']:.4g} s "
                f"(gain {gain:.1%})"
            )
            if in_round() and not answer.get("moved"):
                numbers += f", which does not pay back the {start_s():.0f} s of a round's start"
        if in_round() and (answer["changed"] or not self._told_speeds) and answer["speeds"]:
            tell_speeds(answer["by_gpu"])
            self._told_speeds = True
        if moved := answer.get("moved"):
            self._ended = True  # until the next round
            choose_plan(moved, f"{answer['restart']} layers in its stages")
            self._say(f"iteration {answer['iteration']}: layers move when the state is saved; {numbers}")
            return
        if plan is None:
            self._say(f"iteration {answer['iteration']}: keeps its plan, {reason}; {numbers}")
            return
        self._say(
            f"iteration {answer['iteration']}: {reason}; {numbers}; swaps at "
            f"{iteration + self._notice(plan)} to {answer['digest'][:12]}"
        )
        self._previous = self._present()
        self._command(iteration, plan)

    def _command(self, iteration: int, plan: str, final: bool = False) -> None:
        order = Order(self._orders, iteration + self._notice(plan), plan, final)
        self._watched_until = order.iteration + max(_LOSSES, 2 * self._interval)
        self._ended = self._ended or final
        if final:
            self._previous = None
        self._store.set(f"order/{order.number}", json.dumps(asdict(order)))

    def _notice(self, plan: str) -> int:
        """Return the number of iterations between the order to swap to a plan and the swap.

        Samples that are drawn already stay divided by the old plan.
        """
        session = active_session()
        if session is None or session.share is None:
            return _NOTICE
        shares = swapped_shares(session, _plan(session, plan))
        if shares is None or shares == session.given.shares:
            return _NOTICE
        # Of all shares in flight: a swap may be ordered while loaders are still ahead by the one before.
        fewest = min((*shares, *(session.given.shares or ())), key=lambda share: share.count)
        return _NOTICE + batches_ahead(self._args.num_workers, fewest) + 1

    def _present(self) -> str:
        return dump_plan(_session().given.plan)

    def _opening(self) -> dict[str, Any]:
        args = self._args
        return {
            "plan": self._present(),
            "cluster": args.hexi_cluster,
            "threshold": args.hexi_replan_threshold,
            "interval": self._interval,
            "packed": is_packed(args),
            "shares": may_move_shares(args, _session()),
            "model": model_document(args, _session()),
            "job": job_document(args, _session()),
        }

    @staticmethod
    def _say(message: str) -> None:
        print(f"hexi: replan: {message}", file=sys.stderr, flush=True)


def _session() -> Session:
    session = active_session()
    assert session is not None, "re-planning is for jobs with a plan"
    return session


def _plan(session: Session, text: str) -> Plan:
    return plan_from_yaml(yaml_from_text(Path(session.given.path), text))


_replanner: Replanner | None = None


@patched(
    "megatron.training.training:train_step",
    why="swaps plans between two iterations for --hexi-replan-interval",
    parameters=STEP_PARAMETERS,
)
def _replanning(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    global _replanner
    options = get_args()
    if active_session() is None or options.hexi_replan_interval is None or options.world_size == 1:
        return original(*args, **kwargs)
    if _replanner is None:
        store = job_store(_AGREEMENT)
        assert store is not None, "there are several ranks"
        _replanner = Replanner(meeting(store), options, PlannerConnection)
    iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"]
    with user_errors():
        _replanner.before_step(iteration)
    set_training(True)
    result = original(*args, **kwargs)
    set_training(False)
    _replanner.after_step(result[0])
    return result


REPLANNING_PATCHES = (_replanning,)
