"""Fused operations: plain torch against sums written out in fp64, Triton's kernels against plain torch."""

import math
import os
import subprocess
import sys
import sysconfig
import threading
from importlib.util import find_spec
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan import Mask
from megatron_hexi.runtime import fused
from megatron_hexi.runtime.call_rows import Rows, rows_of
from megatron_hexi.runtime.fused import on_gpu, plain
from megatron_hexi.runtime.fused.plain import MOST_TERMS, Slot
from megatron_hexi.runtime.fused.toolchain import triton_lacks
from megatron_hexi.runtime.sums import RowSum
from tests.support.compiled import carried_out
from tests.support.plans import TORN, examples
from tests.support.reference import plain_results, planned_results, random_problem

#: Triton's interpreter is chosen before Triton is imported: a process of its own runs this file with it.
#: Another one runs it with all tensors on a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = os.environ.get("HEXI_TEST_DEVICE") == "cuda"
if ON_GPU:
    torch.set_default_device("cuda")
#: By how much a type rounds at most. Triton's interpreter cuts bf16 off, where devices round to the nearest.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-10}
TYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = [on_gpu if INTERPRETED or ON_GPU else plain]
each_way = pytest.mark.parametrize(
    "ways", IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2]
)

seeds = given(seed=st.integers(0, 2**32))


class Term(NamedTuple):
    """Some rows of a sum [B, h, Q, D], and where the sum has them their log-sum-exps [B, h, Q]."""

    rows: Rows
    value: torch.Tensor
    log_sum_exp: torch.Tensor | None = None


class Sum(NamedTuple):
    """All rows of a sum [B, h, G, D], and of attention their log-sum-exps [B, h, G]."""

    value: torch.Tensor
    log_sum_exp: torch.Tensor | None = None


def combine(ways, target, terms, base, sinks):
    """The sum of terms, by one of the implementations."""
    totals = [term.log_sum_exp for term in terms if term.log_sum_exp is not None]
    rows, values = [term.rows for term in terms], [term.value for term in terms]
    ways.combine(rows, *target, *(base or (None, None)), sinks, *values, *totals)


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="it runs there already")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("examples_share", ["0.1", pytest.param("1", marks=pytest.mark.slow)])
def test_triton_kernels_by_its_interpreter(examples_share):
    run_this_file(TRITON_INTERPRET="1", HEXI_EXAMPLES=examples_share)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="it runs there already")
def test_triton_kernels_on_a_gpu():
    run_this_file(HEXI_TEST_DEVICE="cuda")


def run_this_file(**variables):
    plugins = ("-p", "no:xdist", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, __file__]
    found = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def strided(random, dtype, *shape):
    """Random numbers, with batch, heads and rows in any order in memory, as columns of something wider."""
    order = random.sample(range(3), 3)
    before, after = random.choice([0, 0, 8]), random.choice([0, 0, 3])
    memory = torch.randn(*(shape[i] for i in order), before + shape[3] + after)
    back = [order.index(i) for i in range(3)]
    return memory.permute(*back, 3)[..., before : before + shape[3]].to(
        dtype, memory_format=torch.preserve_format
    )


def ordered(first, second):
    return min(first, second), max(first, second)


def some_rows(random, count):
    """Some of so many rows: all, a run of them, a few, or each run from behind; at times none."""
    kind = random.choice(["all", "run", "few", "behind"])
    if kind == "all":
        return Rows((0, count))
    ends = sorted(random.randint(0, count) for _ in range(2))
    if kind == "run":
        return Rows((ends[0], ends[1]))
    cuts = sorted(random.sample(range(count + 1), min(count + 1, 2 * random.randint(1, 3)) // 2 * 2))
    ranges = tuple(zip(cuts[::2], cuts[1::2], strict=True))
    return rows_of(ranges, torch.get_default_device(), kind == "behind")


def sum_case(seed):
    """A target, terms, and perhaps a base and sinks."""
    random = Random(seed)
    torch.manual_seed(seed)
    dtype = random.choice(TYPES)
    batch, heads = random.randint(1, 2), random.randint(1, 3)
    rows, size = random.choice([1, 5, 17, 40]), random.choice([1, 8, 24, 64, 80])
    weighed = random.random() < 0.6

    def lse(count):
        return strided(random, torch.float32, batch, heads, count, 1)[..., 0] * random.choice([1, 40])

    terms = []
    for number in range(random.randint(0, MOST_TERMS)):
        some = Rows((0, rows)) if weighed and number == 0 else some_rows(random, rows)
        count = some.span[1] - some.span[0] if some.index is None else len(some.index)
        value = strided(random, dtype, batch, heads, count, size)
        terms.append(Term(some, value, lse(count) if weighed else None))
    base = None
    if random.random() < 0.5 or (weighed and not terms):
        base = Sum(strided(random, torch.float32, batch, heads, rows, size), lse(rows) if weighed else None)
    sinks = torch.randn(heads).to(random.choice(TYPES)) if weighed and random.random() < 0.5 else None
    target = Sum(strided(random, random.choice([dtype, torch.float32]), batch, heads, rows, size))
    if weighed:
        target = Sum(target.value, torch.empty(batch, heads, rows))
    return target, terms, base, sinks


def written_out(target, terms, base, sinks):
    """The sum in fp64, row by row of a matrix of terms."""
    everything = Rows((0, target.value.shape[2]))
    terms = [*terms, *([Term(everything, base.value, base.log_sum_exp)] if base else [])]
    values = torch.zeros(len(terms), *target.value.shape, dtype=torch.float64)
    weights = torch.full(values.shape[:-1], -math.inf, dtype=torch.float64)
    for number, term in enumerate(terms):
        term.rows.put(values[number], term.value.double())
        if target.log_sum_exp is not None:
            term.rows.put(weights[number], term.log_sum_exp.double())
    if target.log_sum_exp is None:
        return values.sum(0), None
    if sinks is not None:
        lone = sinks.double()[None, None, :, None].expand(1, *weights.shape[1:])
        weights = torch.cat([weights, lone])
        values = torch.cat([values, torch.zeros_like(target.value)[None].double()])
    return (values * weights.softmax(0)[..., None]).sum(0), weights.logsumexp(0)


@each_way
@seeds
@examples(12 if ON_GPU else 20 if INTERPRETED else 50)  # each is compiled
def test_a_sum_is_that_of_its_terms(ways, seed):
    target, terms, base, sinks = sum_case(seed)
    expected, log_sum_exp = written_out(target, terms, base, sinks)
    in_place = base is not None and Random(seed).random() < 0.5
    if in_place:
        target = Sum(base.value, base.log_sum_exp)
    combine(ways, target, terms, base, sinks)
    rounding = ROUNDING[target.value.dtype]
    torch.testing.assert_close(target.value.double(), expected, rtol=rounding, atol=4e-6)
    if log_sum_exp is not None:
        torch.testing.assert_close(target.log_sum_exp.double(), log_sum_exp, rtol=1e-6, atol=1e-5)


@each_way
@seeds
@examples(12 if ON_GPU or INTERPRETED else 30)
def test_rows_are_copied(ways, seed):
    random = Random(seed)
    dtype, shape = (
        random.choice(TYPES),
        (random.randint(1, 2), random.randint(1, 3), random.choice([1, 5, 40])),
    )
    source = strided(random, dtype, *shape, random.choice([1, 24, 64]))
    rows = some_rows(random, shape[2])
    expected = rows.taken(source)
    target = strided(random, dtype, *expected.shape)
    ways.copy_rows(rows, target, source)
    assert torch.equal(target, expected)


@each_way
@seeds
@examples(12 if ON_GPU or INTERPRETED else 30)
def test_heads_are_packed_and_unpacked(ways, seed):
    """Between members of a group that hold any heads each, some of them several."""
    random = Random(seed)
    torch.manual_seed(seed)
    tokens, batch = random.choice([0, 1, 3, 40]), random.randint(1, 3)
    dtype = random.choice(TYPES)
    parts, tables = [], []
    members = random.randint(1, 4)
    for _ in range(random.randint(1, 3)):
        heads, size = random.randint(1, 5), random.choice([1, 3, 16, 40])
        parts.append(strided(random, dtype, tokens, batch, heads, size))
        tables.append([ordered(random.randint(0, heads), random.randint(0, heads)) for _ in range(members)])
    slots, offset, pieces = [], 0, []
    for member in range(members):
        columns = [part[:, :, slice(*table[member])] for part, table in zip(parts, tables, strict=True)]
        width = sum(column.shape[2] * column.shape[3] for column in columns)
        pieces.append(torch.cat([column.flatten(2) for column in columns], dim=2).flatten())
        begin = offset
        for number, column in enumerate(columns):
            slots.append(Slot(number, tables[number][member], column.shape[3], begin, width))
            begin += column.shape[2] * column.shape[3]
        offset += len(pieces[-1])
    flat = torch.empty(offset, dtype=dtype)
    where = slots, [part.shape[2] for part in parts], flat.device
    ways.make_pack(*where)(flat, *parts)
    assert torch.equal(flat, torch.cat(pieces))
    found = [torch.zeros_like(part) for part in parts]
    ways.make_unpack(*where)(flat, *found)
    for part, table, back in zip(parts, tables, found, strict=True):
        times = torch.tensor(
            [sum(low <= head < high for low, high in table) for head in range(part.shape[2])]
        )
        expected = part.float() * times[:, None]
        torch.testing.assert_close(back.float(), expected, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="no kernel of Triton is in it")
@seeds
@examples(40)
def test_a_sum_of_any_number_of_terms_over_heads_and_rows_is_one_sum(seed):
    """More terms than one operation takes, of other heads and rows each; in fp64."""
    random = Random(seed)
    torch.manual_seed(seed)
    shape = random.randint(1, 2), random.randint(1, 5), random.choice([1, 9]), 4
    weighed = random.random() < 0.5
    sinks = torch.randn(shape[1], dtype=torch.float64) if weighed and random.random() < 0.5 else None
    added, given_terms, terms = [], [], []
    for number in range(random.randint(1, 3 * MOST_TERMS)):
        heads = ordered(*random.sample(range(shape[1] + 1), 2)) if number else (0, shape[1])
        rows = some_rows(random, shape[2]) if number else Rows((0, shape[2]))
        count = rows.span[1] - rows.span[0] if rows.index is None else len(rows.index)
        value = torch.randn(shape[0], heads[1] - heads[0], count, shape[3], dtype=torch.float64)
        lse = 9 * torch.randn(value.shape[:3], dtype=torch.float64) if weighed else None
        added.append((heads, rows))
        given_terms.append((value,) if lse is None else (value, lse))
        whole = torch.zeros(shape[0], shape[1], count, shape[3], dtype=torch.float64)
        whole[:, slice(*heads)] = value
        lone = whole.new_full(whole.shape[:3], -math.inf)
        if lse is not None:
            lone[:, slice(*heads)] = lse
        terms.append(Term(rows, whole, lone))

    def build(recorder, *values):
        remaining = iter(values)
        total = RowSum(recorder, shape, weighed=weighed, sinks=None if sinks is None else next(remaining))
        for place, term in zip(added, given_terms, strict=True):
            total.add(*place, *(next(remaining) for _ in term))
        return total.result()

    first = () if sinks is None else (sinks,)
    found = Sum(*carried_out(build, *first, *(tensor for term in given_terms for tensor in term)))
    expected = written_out(found, terms, None, sinks)
    torch.testing.assert_close(found.value, expected[0], rtol=0, atol=1e-12)
    if weighed:
        torch.testing.assert_close(found.log_sum_exp, expected[1], rtol=0, atol=1e-12)


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
def test_a_layer_with_windows_documents_and_sinks_is_that_of_one_device(monkeypatch):
    """All of a layer's copies and sums by Triton's kernels, in fp32."""
    launch, lock = on_gpu.launch, threading.Lock()

    def one_at_a_time(*arguments, **constants):
        with lock:  # ranks are threads here, of which the interpreter knows nothing
            launch(*arguments, **constants)

    monkeypatch.setattr(on_gpu, "launch", one_at_a_time)
    monkeypatch.setattr(fused, "implementation", lambda device, dtype: on_gpu)
    length = TORN.workload.seq_length
    mask = Mask(window=5, documents=(length - 14, 1, 0, 13))
    problem = random_problem(TORN.workload, 1, torch.float32, seed=0, mask=mask, has_sinks=True)
    expected = plain_results(problem.to(torch.float64))
    for result, truth in zip(planned_results(TORN, problem), expected, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="the interpreter compiles nothing, and a GPU for itself")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(("terms", "weighed"), [(MOST_TERMS, True), (1, False)])
def test_triton_kernels_compile_for_gpus(capability, terms, weighed, monkeypatch, tmp_path):
    """For devices that are not here, in bf16: by the types that a launch gives."""
    compiler = pytest.importorskip("triton.compiler", reason="needs Triton")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    kernels = pytest.importorskip("megatron_hexi.runtime.fused.triton_kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    given = {}

    def launch(kernel, grid, reads, writes, *arguments, **constants):
        given[kernel] = [*arguments, *constants.values()], len(constants)

    monkeypatch.setattr(on_gpu, "launch", launch)
    value, lse = torch.zeros(1, 2, 5, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 5) if weighed else None
    few = rows_of(((0, 2), (3, 5)), torch.device("cpu"))
    term = Term(few, value[:, :, :4], None if lse is None else lse[:, :, :4])
    combine(on_gpu, Sum(value, lse), [term] * terms, Sum(value.float(), lse) if weighed else None, None)
    slots = [Slot(0, (0, 2), 64, 0, 128)] * terms
    on_gpu.make_unpack(slots, [2], value.device)(value.flatten(), value)
    for name, (arguments, constants) in given.items():
        kernel = getattr(kernels, name)
        signature: dict = {}
        values: dict = {}
        for place, (parameter, argument) in enumerate(zip(kernel.arg_names, arguments, strict=True)):
            is_constant = place >= len(arguments) - constants
            signature[parameter] = _triton_type((place,), argument, is_constant, values)
        compiled = compiler.compile(compiler.ASTSource(kernel, signature, values), target=target)
        assert compiled.asm["cubin"]


def _triton_type(path, argument, is_constant, values):
    """As Triton takes an argument; what it compiles in goes to `values`."""
    if isinstance(argument, tuple):
        return tuple(_triton_type((*path, i), one, is_constant, values) for i, one in enumerate(argument))
    if argument is None or is_constant:
        values[path] = argument
        return "constexpr"
    if isinstance(argument, int):
        return "i32"
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
    return "*" + names[argument.dtype]


@pytest.fixture
def toolchain(monkeypatch):
    """Triton's needs, asked anew."""
    triton_lacks.cache_clear()
    monkeypatch.delenv("CC", raising=False)
    yield monkeypatch
    triton_lacks.cache_clear()


def test_without_a_c_compiler_triton_is_left_alone(toolchain, tmp_path):
    toolchain.setenv("PATH", str(tmp_path))
    assert "no C compiler" in triton_lacks()
    fused.has_triton.cache_clear()
    with pytest.warns(UserWarning, match="no C compiler.*plain torch"):
        assert not fused.has_triton()
    fused.has_triton.cache_clear()
    triton_lacks.cache_clear()
    toolchain.setenv("CC", "no-such-compiler -O2")
    assert triton_lacks().endswith("there is no CC=no-such-compiler -O2")


def test_without_python_headers_triton_is_left_alone(toolchain, tmp_path):
    toolchain.setenv("CC", sys.executable)  # there is one
    toolchain.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert triton_lacks() == f"Triton finds no Python.h in {tmp_path}"
    triton_lacks.cache_clear()
    (tmp_path / "Python.h").touch()
    assert triton_lacks() == ""
