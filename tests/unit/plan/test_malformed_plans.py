"""What a person can do to a plan by mistake: each gives one line with file, line, place, value and remedy."""

from dataclasses import dataclass

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import read_plan

GOOD = """\
version: 2
workload:
  seq_length: 64
  heads: 8
  kv_heads: 4
  head_dim: 16
  causal: true
  layers: 2
  value_dim: 16
replicas:
- micro_batches: 3
  stages:
  - layers: null
    domains:
    - groups:
      - name: fast
        segments: [[0, 20], [44, 64]]
        members:
        - {ranks: [0], tokens: 25, heads: [0, 5]}
        - {ranks: [1], tokens: 15, heads: [5, 8]}
      - name: slow
        segments: [[20, 44]]
        members:
        - {ranks: [2], tokens: 24, heads: [0, 8]}
exchange: {window: 1}
estimate: {iteration_s: 1.5, memory_gib: [1.0, 2.0, 3.0], against: {ring: 2.5}}
provenance: {planner: hexi, seed: 0}
"""

GROUPS = "replicas[0].stages[0].domains[0].groups"
FAST, SLOW = f"{GROUPS}[0]", f"{GROUPS}[1]"
SLOW_GROUP = """\
      - name: slow
        segments: [[20, 44]]
        members:
        - {ranks: [2], tokens: 24, heads: [0, 8]}
"""
GROUPS_TEXT = GOOD[GOOD.index("      - name: fast") : GOOD.index("exchange:")]
STAGE = GOOD[GOOD.index("  - layers: null") : GOOD.index("exchange:")]


@dataclass
class Mistake:
    """An edit of the good plan, the line that the error names, and what else it says, in this order."""

    name: str
    old: str
    new: str | bytes
    line: int
    says: tuple[str, ...]


def whole(name, content, line, *says):
    return Mistake(name, GOOD, content, line, says)


def edit(name, old, new, line, *says):
    return Mistake(name, old, new, line, says)


MISTAKES = [
    # Not a plan at all.
    whole("not YAML", "workload: [1, 2\nreplicas: {", 2, "not valid YAML", "correct that line"),
    whole("empty file", "", 1, "not a plan: found nothing", "write a mapping with workload and replicas"),
    whole("a list", "- 1\n- 2\n", 1, "not a plan: found [1, 2]", "write a mapping"),
    whole("a word", "plan\n", 1, "not a plan: found 'plan'", "write a mapping"),
    whole("two documents", f"{GOOD}---\n{GOOD}", 28, "expected a single document", "correct that line"),
    whole("a bomb of aliases", "a: &a [1]\nb: &b [*a, *a]\n", 2, "alias *a", "write the value out"),
    whole("nested deeply", "a: " + "[" * 100_000, 1, "nested more than 50 levels", "right file?"),
    whole("nested deeply in blocks", "a:\n" + "- " * 100_000, 2, "nested more than 50 levels", "right file?"),
    whole("a list as a key", "? [1, 2]\n: 3\n", 1, "a key that is a list", "keys are plain words"),
    whole("a binary file", b"\x7fELF\x02\x01\x00\x00", None, "not text", "#x007f", "right file?"),
    whole("bytes that are no text", b"version: \xff\xfe\x80", None, "not text (no UTF-8)", "right file?"),
    edit("a tab as indentation", "  heads: 8", "\theads: 8", 4, "not valid YAML", "correct that line"),
    edit(
        "code",
        "seed: 0",
        "seed: !!python/name:os.system x",
        27,
        "provenance.seed",
        "'x'",
        "write a plain value",
    ),
    edit(
        "a key twice",
        "  heads: 8\n",
        "  heads: 8\n  heads: 9\n",
        5,
        "workload.heads is given twice",
        "keep one",
    ),
    # Fields.
    edit(
        "another version",
        "version: 2",
        "version: 3",
        1,
        "version is 3",
        "reads 1 and 2",
        "make the plan again",
    ),
    edit(
        "a version that is not an int",
        "version: 2",
        "version: true",
        1,
        "version is True",
        "make the plan again",
    ),
    edit("no workload", GOOD[11 : GOOD.index("replicas")], "", 1, "workload is missing", "add it"),
    edit(
        "no replicas field",
        GOOD[GOOD.index("replicas") : GOOD.index("exch")],
        "",
        1,
        "replicas is missing",
        "add",
    ),
    edit("a missing number", "  head_dim: 16\n", "", 3, "workload.head_dim is missing", "add it"),
    edit(
        "a typo", "kv_heads: 4", "kv_head: 4", 5, "workload.kv_head is not a known field", "correct its name"
    ),
    edit(
        "a typo at the top",
        "exchange:",
        "exchanges:",
        25,
        "exchanges is not a known field",
        "correct its name",
    ),
    edit(
        "a member without heads", ", heads: [0, 5]", "", 19, f"{FAST}.members[0].heads is missing", "add it"
    ),
    edit(
        "a workload that is a word",
        "exchange: {window: 1}",
        "exchange: fast",
        25,
        "exchange = 'fast'",
        "mapping",
    ),
    edit(
        "groups that are a mapping",
        STAGE,
        "  - domains: [{groups: {a: 1}}]\n",
        13,
        GROUPS,
        "{'a': 1}",
        "not a list",
    ),
    edit(
        "a member that is a number",
        "- {ranks: [2], tokens: 24, heads: [0, 8]}",
        "- 2",
        24,
        "[0] = 2",
        "mapping",
    ),
    edit("a name that is a number", "name: slow", "name: 7", 21, f"{SLOW}.name = 7 is not text", "quotes"),
    # Numbers.
    edit(
        "text for a number",
        "seq_length: 64",
        "seq_length: many",
        3,
        "workload.seq_length = 'many'",
        "whole number",
    ),
    edit(
        "a number in quotes",
        "heads: 8\n",
        "heads: '8'\n",
        4,
        "workload.heads = '8'",
        "not a whole number",
        "write",
    ),
    edit(
        "a float for an int",
        "head_dim: 16",
        "head_dim: 16.0",
        6,
        "head_dim = 16.0",
        "not a whole number",
        "write",
    ),
    edit(
        "a bool for an int",
        "layers: 2",
        "layers: true",
        8,
        "workload.layers = True",
        "not a whole number",
        "write",
    ),
    edit(
        "nothing for an int",
        "seq_length: 64",
        "seq_length:",
        3,
        "seq_length = None",
        "not a whole number",
        "write",
    ),
    edit(
        "an int for a bool",
        "causal: true",
        "causal: 3",
        7,
        "workload.causal = 3",
        "not true or false",
        "write one",
    ),
    edit(
        "text for a bool",
        "causal: true",
        "causal: maybe",
        7,
        "causal = 'maybe'",
        "not true or false",
        "write one",
    ),
    edit(
        "negative tokens",
        "tokens: 24",
        "tokens: -24",
        24,
        f"{SLOW}.members[0].tokens = -24",
        "too small",
        "is 0",
    ),
    edit(
        "a negative rank",
        "ranks: [0],",
        "ranks: [-1],",
        19,
        f"{FAST}.members[0].ranks[0] = -1",
        "too small",
        "is 0",
    ),
    edit(
        "zero seq_length", "seq_length: 64", "seq_length: 0", 3, "seq_length = 0", "too small", "least is 1"
    ),
    edit("zero heads", "  heads: 8", "  heads: 0", 4, "workload.heads = 0", "too small", "least is 1"),
    edit("zero KV heads", "kv_heads: 4", "kv_heads: 0", 5, "kv_heads = 0", "too small", "least is 1"),
    edit("window 0", "window: 1", "window: 0", 25, "exchange.window = 0", "too small", "least is 1"),
    edit("zero micro-batches", "micro_batches: 3", "micro_batches: 0", 11, "micro_batches = 0", "least is 1"),
    edit("a huge number", "seq_length: 64", f"seq_length: {10**30}", 3, "too large", str(2**40)),
    edit(
        "a number without end",
        "seq_length: 64",
        "seq_length: " + "9" * 5000,
        3,
        "seq_length",
        "cannot be read",
    ),
    edit(
        "NaN",
        "iteration_s: 1.5",
        "iteration_s: .nan",
        26,
        "estimate.iteration_s = nan",
        "not finite",
        "write",
    ),
    edit("infinity", "3.0]", ".inf]", 26, "estimate.memory_gib[2] = inf", "not finite", "write"),
    edit(
        "negative seconds",
        "ring: 2.5",
        "ring: -2.5",
        26,
        "estimate.against.ring = -2.5",
        "too small",
        "least is 0",
    ),
    edit("text for seconds", "1.5", "soon", 26, "estimate.iteration_s = 'soon'", "not a number", "write one"),
    # The workload's own rules.
    edit(
        "KV heads that do not divide", "kv_heads: 4", "kv_heads: 3", 5, "kv_heads is 3", "the 8 heads", "give"
    ),
    edit(
        "more KV heads than heads", "kv_heads: 4", "kv_heads: 16", 5, "kv_heads is 16", "the 8 heads", "give"
    ),
    edit(
        "units that do not divide the heads",
        "{ranks: [2], tokens: 24, heads: [0, 8]}",
        "{ranks: [2, 3, 4], tokens: 24, heads: [0, 8]}",
        24,
        f"{SLOW}.members[0].ranks has 3 ranks",
        "cannot share 8 heads and 4 KV heads",
        "divide the heads",
    ),
    edit(
        "units of two sizes",
        "{ranks: [2], tokens: 24, heads: [0, 8]}",
        "{ranks: [2, 3], tokens: 24, heads: [0, 8]}",
        24,
        f"{SLOW}.members[0].ranks has 2 ranks, the first member 1",
        "give all units",
    ),
    edit(
        "a unit without ranks", "{ranks: [2],", "{ranks: [],", 24, f"{SLOW}.members[0].ranks = []", "is empty"
    ),
    edit(
        "tensor parallel beside the ranks",
        "  value_dim: 16\n",
        "  tensor_parallel: 1\n",
        9,
        "workload.tensor_parallel is not a known field",
        "follows from the ranks",
    ),
    # Segments and tokens.
    edit(
        "a backward segment",
        "[[20, 44]]",
        "[[44, 20]]",
        22,
        f"{SLOW}.segments[0] [44, 20]",
        "backwards",
        "start <=",
    ),
    edit(
        "a segment past the end",
        "[44, 64]]",
        "[44, 65]]",
        17,
        f"{FAST}.segments[1] [44, 65]",
        "64",
        "end it at 64",
    ),
    edit(
        "unsorted segments",
        "[[0, 20], [44, 64]]",
        "[[44, 64], [0, 20]]",
        17,
        "segments[1] [0, 20]",
        "ascending",
    ),
    edit(
        "segments that overlap in a group",
        "[44, 64]]",
        "[19, 64]]",
        17,
        "[19, 64] does not",
        "[0, 20]",
        "without",
    ),
    edit(
        "segments that overlap between groups",
        "[[20, 44]]",
        "[[19, 43]]",
        22,
        f"{SLOW}.segments[0] [19, 43] holds position 19",
        "another group",
        "one group",
    ),
    edit(
        "a gap in the segments",
        "[[0, 20], [44, 64]]",
        "[[0, 19], [43, 64]]",
        16,
        f"{GROUPS} leave position 19 to no group",
        "cover [0, 64), which is seq_length",
    ),
    edit(
        "a segment of one number", "[[20, 44]]", "[[20]]", 22, f"{SLOW}.segments[0][1] is missing", "add it"
    ),
    edit("a flat segment", "[[20, 44]]", "[20, 44]", 22, f"{SLOW}.segments[0] = 20", "not a list", "write"),
    edit(
        "tokens that do not sum",
        "tokens: 15",
        "tokens: 16",
        19,
        f"{FAST}.members hold 41 tokens",
        "40",
        "equal",
    ),
    # Heads.
    edit("a gap in the heads", "[5, 8]", "[6, 8]", 19, f"{FAST}.members leave head 5 to no", "cover [0, 8)"),
    edit(
        "heads missing at the end",
        "heads: [0, 8]",
        "heads: [0, 7]",
        24,
        f"{SLOW}.members leave head 7",
        "cover",
    ),
    edit(
        "heads twice",
        "[5, 8]",
        "[4, 8]",
        20,
        "members[1].heads [4, 8] holds head 4",
        "another member",
        "one member",
    ),
    edit(
        "heads past the end",
        "[5, 8]",
        "[5, 9]",
        20,
        f"{FAST}.members[1].heads [5, 9] ends after heads = 8",
        "at 8",
    ),
    edit(
        "backward heads",
        "[5, 8]",
        "[8, 5]",
        20,
        f"{FAST}.members[1].heads [8, 5] runs backwards",
        "start <= stop",
    ),
    edit(
        "a range of three", "[5, 8]", "[5, 6, 8]", 20, "heads = [5, 6, 8]", "too many values", "the most is 2"
    ),
    edit(
        "heads of one parallel rank",
        GROUPS_TEXT,
        GROUPS_TEXT.replace("[0],", "[0, 1],").replace("[1],", "[2, 3],").replace("[2],", "[4, 5],"),
        19,
        "[0, 5] ends after heads / tensor_parallel = 4",
    ),
    # Ranks, groups, replicas.
    edit(
        "a rank twice",
        "ranks: [2]",
        "ranks: [1]",
        24,
        f"{SLOW}.members[0].ranks has 1",
        f":20: {FAST}.members[1]",
        "one place",
    ),
    edit(
        "descending ranks",
        "{ranks: [0], tokens: 25, heads: [0, 5]}\n        - {ranks: [1]",
        "{ranks: [1], tokens: 25, heads: [0, 5]}\n        - {ranks: [0]",
        20,
        f"{FAST}.members[1].ranks begins with 0, after 1",
        "ascending rank order",
    ),
    edit(
        "a missing rank",
        "ranks: [2]",
        "ranks: [3]",
        11,
        "replicas have 3 ranks",
        "rank 2 is missing",
        "number them 0 to 2",
    ),
    edit("no groups", STAGE, "  - domains: [{groups: []}]\n", 13, f"{GROUPS} is empty", "at least one group"),
    edit(
        "no members",
        "members:\n        - {ranks: [2], tokens: 24, heads: [0, 8]}",
        "members: []",
        23,
        "is empty",
        "drop",
    ),
    edit(
        "no replicas",
        GOOD[GOOD.index("replicas") : GOOD.index("exch")],
        "replicas: []\n",
        10,
        "replicas is empty",
        "one",
    ),
    edit("no stages", f"stages:\n{STAGE}", "stages: []\n", 12, "replicas[0].stages is empty", "at least one"),
    edit(
        "two stages",
        STAGE,
        STAGE + STAGE,
        13,
        "stages[0].layers is missing",
        "as [start, stop]",
    ),
    edit("layers of a stage", "layers: null", "layers: 1", 13, "stages[0].layers = 1", "not a list"),
    edit(
        "layers left out",
        "layers: null",
        "layers: [0, 1]",
        13,
        "stages[0].layers ends at layer 1",
        "end it at 2",
    ),
    edit(
        "layers from the second",
        "layers: null",
        "layers: [1, 2]",
        13,
        "stages[0].layers begins at layer 1",
        "begin at 0",
    ),
    edit(
        "recomputation of more layers than there are",
        "layers: null",
        "layers: [0, 2]\n    recompute: 3",
        14,
        "stages[0].recompute is 3, the stage has 2 layers",
        "give full",
    ),
    edit(
        "samples without a micro-batch",
        "    - groups:",
        "    - samples: 2\n      groups:",
        1,
        "job.micro_batch_size is missing, domains share its samples",
        "give 2",
    ),
    edit(
        "a batch that replicas do not take",
        "exchange: {window: 1}",
        "job: {micro_batch_size: 2, global_batch_size: 8}",
        25,
        "job.global_batch_size is 8, the replicas take 3 micro-batches of 2",
        "give 6",
    ),
    edit(
        "a version of thousands of digits",
        "version: 2",
        f"version: 0x{'f' * 4000}",
        1,
        "version is a number of thousands of digits",
        "make the plan again",
    ),
    edit(
        "a size of thousands of digits",
        "heads: 8\n  kv",
        f"heads: 0x{'f' * 4000}\n  kv",
        4,
        "workload.heads = a number of thousands of digits is too large",
        "the most is",
    ),
    edit(
        "a list with a number of thousands of digits",
        "seq_length: 64",
        f"seq_length: [0x{'f' * 4000}]",
        3,
        "workload.seq_length = a number of thousands of digits is not a whole number",
        "write one",
    ),
    edit(
        "more layers than any model has",
        "  layers: 2",
        "  layers: 1000000000",
        8,
        "workload.layers = 1000000000 is too large",
        "the most is 10000",
    ),
    edit(
        "more heads than any model has",
        "heads: 8\n  kv",
        "heads: 1000000000\n  kv",
        4,
        "workload.heads = 1000000000 is too large",
        "the most is 100000",
    ),
    edit(
        "more ministages than any model has layers",
        "layers: null",
        "layers: [0, 2]\n    ministages: 1000000000",
        14,
        "stages[0].ministages = 1000000000 is too large",
        "the most is 10000",
    ),
    edit(
        "more micro-batches than any job takes",
        "- micro_batches: 3",
        "- micro_batches: 1000000000",
        11,
        "replicas[0].micro_batches = 1000000000 is too large",
        "the most is 100000",
    ),
    edit(
        "more recomputed layers than any model has",
        "layers: null",
        "layers: [0, 2]\n    recompute: 10000000000000",
        14,
        "stages[0].recompute = 10000000000000 is too large",
        "the most is 10000",
    ),
    edit(
        "an unknown word for recomputation",
        "layers: null",
        "layers: [0, 2]\n    recompute: some",
        14,
        "stages[0].recompute = 'some' is not known",
        "write 'none', 'selective' or 'full', or a whole number",
    ),
    edit(
        "a name that changes a terminal",
        "- name: fast",
        '- name: "\\e[31mfast"',
        16,
        f"{FAST}.name = '\\x1b[31mfast' has characters that cannot be printed",
        "leave them out",
    ),
    edit(
        "a name that no table holds",
        "- name: fast",
        f"- name: {'fast' * 1000}",
        16,
        f"{FAST}.name = 'fast",
        "is too long",
        "at most 200 characters",
    ),
    edit("a group left out", SLOW_GROUP, "", 16, f"{GROUPS} leave position 20 to no group", "cover [0, 64)"),
]


def error_of(mistake, folder):
    path = folder / "plan.yaml"
    content = mistake.new
    if isinstance(content, str):
        assert GOOD.count(mistake.old) == 1, "the edit must be the only one that it can be"
        content = GOOD.replace(mistake.old, content).encode()
    path.write_bytes(content)
    with pytest.raises(HexiError) as caught:
        read_plan(path)
    return str(caught.value), path


def test_the_plan_that_the_mistakes_are_made_in_is_good(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(GOOD)
    assert read_plan(path).ranks == 3


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_gives_one_line_that_says_where_what_and_how_to_mend_it(mistake, tmp_path):
    message, path = error_of(mistake, tmp_path)
    assert len(message.splitlines()) == 1
    assert len(message) < 300 + len(str(path))
    assert message.startswith(f"{path}:{mistake.line}: " if mistake.line else f"{path}: "), message
    rest = message.removeprefix(str(path))
    for fragment in mistake.says:
        assert fragment in rest, message
        rest = rest[rest.index(fragment) + len(fragment) :]


def test_no_two_mistakes_give_the_same_line(tmp_path):
    messages = [error_of(mistake, tmp_path)[0] for mistake in MISTAKES]
    assert len(set(messages)) == len(messages)


def test_a_file_that_is_not_there_is_named_with_the_remedy(tmp_path):
    path = tmp_path / "absent.yaml"
    with pytest.raises(HexiError) as caught:
        read_plan(path)
    assert str(caught.value) == (
        f"{path}: cannot be read (No such file or directory); check the path and its permissions"
    )


def test_a_folder_is_named_with_the_remedy(tmp_path):
    with pytest.raises(HexiError) as caught:
        read_plan(tmp_path)
    assert (
        str(caught.value)
        == f"{tmp_path}: cannot be read (a folder, no regular file); check the path and its permissions"
    )


def test_a_file_far_too_large_is_not_read(tmp_path):
    path = tmp_path / "disk.img"
    with path.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(
        HexiError, match=r"disk\.img: 1099511627776 bytes, more than .* that are read; is it the right"
    ):
        read_plan(path)
