"""A time that no layout can beat: replicas x pipelines x layers and tensor-parallel size of a stage x context
and heads x recomputation x ministages and offload x shares of the batch. A linear program, in the terms of
options.py.

Take any plan of the cost model that fits in memory and takes T. Of a stage with l of the L layers f is l / L
and q is 1 / f; each of its GPUs is in some option, with works x and z. Then, with the best rates:

time   m micro-batches take tau each in the stage, and one passes the others besides (period.py: sum of tau
       + (m - 1) x longest), no faster than on all GPUs together; the optimizer's step follows. Nothing of a
       GPU's own work overlaps (layer.py):   seconds(x, z) <= T - step - (1 - f) pass / V
       where V are the chunks that the stage may have at most: as many as are fixed, or l; without end, if
       l > 1, where stages that differ may interleave ministages: a slow one's own passes may hide all others
memory Kept are l layers of n micro-batches, L S x n / m: one on a last stage, min(m, 2) before it, and
       m <= w / B. No fewer with chunks: two micro-batches have passed all of them before a stage that is not
       the last runs backward. Under way is one layer, S x q / m. What attention keeps goes by tokens of the
       group x heads of the unit: half as much as z at least, since a token sees S tokens at most and S / 2 on
       average.
room   The same of all GPUs together, where tokens x heads are as many as x; and the optimizer's state once.
spread Each layer of each sequence has one mode: of all replicas in a range of w, z of a mode is as much as x.
last   A replica has one last stage, with the logits: its x q is w.
depth  Where pipelines have a fixed number of stages: x q of all of these is w times the number.
fill   Let a second of GPU g be worth c_g, so that a sequence's token work and attention together are worth 1
       at least, wherever they are done. With C the worth of a stage's GPUs and W that of what they do for a
       micro-batch, C tau >= W, and by Cauchy's inequality (second line) the GPUs of a replica are worth
         (T - step) sum C >= (sum tau + (m - 1) max tau) sum C
                          >= (sum sqrt(C tau))^2 + (m - 1) sum C tau >= m sum W + (sum sqrt W)^2 - sum W
       where the last two are the sum of sqrt(W W') over pairs of different stages, which falls with no W; and
       W >= B f. So they idle for B ((sum sqrt f)^2 - 1) at least. Now sum sqrt f = sum f sqrt q = E, and
       E^2 >= 2 a E - a^2 for any a: they idle for B sum f (2 a sqrt q - a^2 - 1), linear in f = x / w; and in
       f = z / w, by which attention does not go where layers are few. Equal stages of V chunks idle for a
       V-th of it, and their terms are alike: those above 0 count a V-th, and nothing where V has no end.

A stage in ministages (options.py) gives idle time to the fill row and takes nothing of it; no micro-batch
passes the others before it ends. All stages of its replica are, so those before the last have q - 1 times
the x of the last or more. The optimizer's state may lie in host memory: the room has that too.

Sums over GPUs keep each row, and the sequences of all replicas are the batch. So where the program does less
than the batch, T is not possible, and nothing below. What travels between units is not counted, nor that
layers are whole: on thin links the bound says little.

A solver only suggests prices of rows. At any prices the batch is at most what is worth most of each kind's
GPUs over all vertices of all options (weak duality); that is evaluated here, and decides.

A plan has one size of micro-batches. What the program of a range refutes, it refutes for all sizes in it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.proof.options import MODES, ranges
from benchmarks.proof.program import MARGIN, SHARES_STEP, BoundProgram
from megatron_hexi.cluster import Cluster
from megatron_hexi.plan.recompute import of_layer
from megatron_hexi.planner import bound
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.request import Request

#: Relative precision of the bound.
_PRECISION = 2e-4
#: The first time that is tried is longer than the ceiling's by this part.
_RISE = 0.01
#: The most steps towards the time at which prices cease to refute, and the part of the batch that may be
#: missing there.
_TRIES, _NEAR = 6, 5e-5
#: Multiple of the ceiling's time at which only memory decides.
_LONG = 1e9


def joint_bound(request: Request, cluster: Cluster, found_s: float = math.inf) -> Bound:
    """Return the bound over all layouts with causal attention and the request's tensor-parallel sizes.

    Args:
        found_s: seconds of an iteration that is known to be possible; the bound is at most that.

    Raises:
        ClusterError: a GPU cannot do the job.
    """
    if _is_beyond_program(request):
        return bound.lower_bound(request, cluster, found_s)
    nothing = "no layout fits in memory" if math.isinf(found_s) else "no layout is faster than the one found"
    least = Bound(found_s, nothing)
    program, sizes = None, _sizes(request)
    while sizes:
        program = BoundProgram(request, cluster, sizes.pop(0), program)
        most_s = min(least.iteration_s, _LONG * program.ceiling_s)
        if program.may_finish(most_s):
            seconds = _least_s(program, most_s)
            if seconds < least.iteration_s:
                why = f"all GPUs at their best rates take {program.ceiling_s:.4g} s{program.needs}"
                least = Bound(seconds, why)
        if not sizes:
            break
        # Larger micro-batches, all at once: mostly none is faster, or hardly.
        larger = BoundProgram(request, cluster, (sizes[0][0], sizes[-1][1]), program)
        most_s = min(least.iteration_s, _LONG * larger.ceiling_s)
        near_s = most_s * (1 - _PRECISION)
        if not larger.may_finish(most_s):
            break
        if not larger.may_finish(near_s):
            least = replace(least, iteration_s=_refuted_to(larger, near_s, most_s))
            break
    return least


def memory_fits(request: Request, cluster: Cluster) -> bool:
    """Whether some layout may fit in memory; if not, none fits.

    Raises:
        ClusterError: a GPU cannot do the job.
    """
    if _is_beyond_program(request):
        return bound.memory_fits(request, cluster)
    programs = (BoundProgram(request, cluster, sizes) for sizes in _sizes(request))
    return any(program.may_finish(_LONG * program.ceiling_s) for program in programs)


def _is_beyond_program(request: Request) -> bool:
    """Whether the linear program does not hold for a job, which only the ceiling then bounds.

    Any rank may compute experts of other ranks' tokens; where layers differ, the program's rows would mix
    those of several kinds; where latent columns travel, other ranks make a token's keys and values, and
    keep less of them; a scan's work goes by heads and tokens, not by pairs; and a layer of a hybrid has one
    part and one sum over tensor-parallel ranks, not two. Of modules that are fixed it knows some.
    """
    model, mode = request.job.model, of_layer(request.job.recompute)
    if "recompute" in request.fixed and mode not in MODES:
        return True
    special = (model.experts, model.latent, model.state)
    return any(part is not None for part in special) or not model.is_uniform or bool(model.pattern)


def _sizes(request: Request) -> list[tuple[int, int]]:
    """Return ranges of micro-batch sizes to bound together, each as its smallest and largest size."""
    batch, size = request.job.global_batch_size, request.job.micro_batch_size
    if "micro_batch_size" in request.fixed:
        return [(size, size)]
    small = [size for size in range(1, math.isqrt(batch) + 1) if batch % size == 0]
    divisors = sorted({*small, *(batch // size for size in small)})
    size_ranges = [
        [size for size in divisors if first <= size <= last] for first, last in ranges(1, batch, SHARES_STEP)
    ]
    return [(sizes[0], sizes[-1]) for sizes in size_ranges if sizes]


def _least_s(program: BoundProgram, most_s: float) -> float:
    """Return the longest time up to `most_s`, to the precision, that a program refutes."""
    low, high, step = program.ceiling_s * (1 - MARGIN), most_s, _RISE
    while high > low * (1 + _PRECISION):
        middle = min(low * (1 + step), math.sqrt(low * high))
        if program.may_finish(middle):
            high, step = middle, _PRECISION
        else:
            low = _refuted_to(program, middle, high)
            step = _PRECISION if low > middle else 4 * step
    return low


def _refuted_to(program: BoundProgram, low: float, high: float) -> float:
    """Return a time up to `high` that the prices which refute `low` refute as well."""
    done, time = program.done, low * (1 + _PRECISION)
    for _ in range(_TRIES):
        time = min(time, high)
        then = program.most_done(time)
        slope = (then - done) / (time - low)
        if then < 1 - MARGIN:
            low, done = time, then
        if low >= high or done > 1 - _NEAR:
            break
        time = low + (1 - _NEAR / 2 - done) / slope if slope > 0 else high
    return low
