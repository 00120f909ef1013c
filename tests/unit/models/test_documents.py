"""Packed documents: expected tokens and pairs against sequences packed one by one, and what files say."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.errors import HexiError
from megatron_hexi.models import Documents, read_documents
from tests.support.plans import RANDOMS, examples


def histogram(random):
    """A random histogram of few lengths, with common divisors more often than not."""
    unit = random.choice([1, 1, 2, 3, 8])
    lengths = sorted(
        {unit * random.randint(1, random.choice([5, 60, 300])) for _ in range(random.randint(1, 6))}
    )
    return Documents(tuple(lengths), tuple(float(random.randint(1, 9)) for _ in lengths))


def packed(documents, seq_length, sequences, random):
    """Pieces of each sequence of a stream, cut token by token."""
    stream = iter(lambda: random.choices(documents.lengths, documents.counts)[0], None)
    found, left = [], 0
    for _ in range(sequences):
        pieces, free = [], seq_length
        while free:
            left = left or next(stream)
            pieces.append(min(left, free))
            free, left = free - pieces[-1], left - pieces[-1]
        found.append(pieces)
    return found


def pairs(pieces):
    return sum(length * (length + 1) // 2 for length in pieces)


@given(RANDOMS)
@examples(60)
def test_tokens_and_pairs_are_those_of_sequences_packed_one_by_one(random):
    documents, seq_length = histogram(random), random.choice([24, 100, 128])
    classes = documents.classes(seq_length)
    assert sum(share for share, _ in classes) == pytest.approx(1)
    assert classes[0].length >= 1
    assert classes[-1].length <= seq_length * (1 + 1e-12)
    counted = [pairs(pieces) for pieces in packed(documents, seq_length, 3000, random)]
    # Neighbouring sequences share a document, so that they are not independent: a wide band.
    error = 5 * np.std(counted) / math.sqrt(len(counted)) + 0.005 * np.mean(counted)
    assert documents.pairs(seq_length) == pytest.approx(np.mean(counted), abs=error)


@given(RANDOMS)
@examples(30)
def test_drawn_sequences_are_packed_alike(random):
    documents, seq_length = histogram(random), random.choice([24, 100, 128])
    drawn = list(itertools.islice(documents.drawn(seq_length, seed=1), 3000))
    assert {sum(pieces) for pieces in drawn} == {seq_length}
    assert drawn[:20] == list(itertools.islice(documents.drawn(seq_length, seed=1), 20))
    counted = [pairs(pieces) for pieces in drawn]
    error = 5 * np.std(counted) / math.sqrt(len(counted)) + 0.005 * np.mean(counted)
    assert documents.pairs(seq_length) == pytest.approx(np.mean(counted), abs=error)


@pytest.mark.parametrize("length", [64, 128, 640])
def test_documents_of_whole_sequences_are_one_class(length):
    assert Documents((length,), (3.0,)).classes(64) == ((1.0, 64.0),)


@pytest.mark.parametrize(("median", "sigma"), [(1500, 1.2), (64, 0.5), (300, 2.0)])
def test_a_lognormal_distribution_has_its_moments(median, sigma):
    documents = read_documents(f"lognormal:{median},{sigma}")
    assert documents.mean == pytest.approx(median * math.exp(sigma**2 / 2), rel=2e-3)
    random = np.random.default_rng(1)
    drawn = np.minimum(random.lognormal(math.log(median), sigma, 200_000), 8192)
    shorter = Documents(documents.lengths, documents.counts)
    below = np.dot(np.array(shorter.lengths) <= 2 * median, shorter.counts) / sum(shorter.counts)
    assert below == pytest.approx(np.mean(drawn <= 2 * median), abs=0.01)
    cut = read_documents(f"lognormal:{median},{sigma},8192")
    assert cut.lengths[-1] <= 8192
    assert cut.mean == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize(
    "content", ["64\n128 3\n64 # again\n\n", "[64, 128, 128, 128, 64]", "128,3\n64 2\n", "﻿64 2\r\n128 3\r\n"]
)
def test_files_of_lines_and_of_json_say_the_same(tmp_path, content):
    path = tmp_path / "lengths"
    path.write_text(content)
    assert read_documents(str(path)) == Documents((64, 128), (2.0, 3.0))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("64\n\n12x\n", ["line 3", "'12x'", "1500 20"]),
        ("64\n0\n", ["line 2", "'0'"]),
        ("64 2 9\n", ["line 1", "'64 2 9'"]),
        ("64 -2\n", ["line 1"]),
        ("1e3\n", ["line 1", "'1e3'"]),
        ("64\n" + "9" * 30, ["line 2"]),
        ("[64,\n 12x]", ["line 2", "JSON"]),
        ("[64, 1.5]", ["entry 2", "'1.5'"]),
        ("[64, true]", ["entry 2", "'True'"]),
        ('{"64": 2}', ["JSON list"]),
        ("[" * 100_000, ["JSON"]),
        ("", ["holds no lengths"]),
        ("# nothing\n", ["holds no lengths"]),
        ("[]", ["holds no lengths"]),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place_and_a_remedy(tmp_path, content, words):
    path = tmp_path / "lengths"
    path.write_text(content)
    with pytest.raises(HexiError) as raised:
        read_documents(str(path))
    for word in (str(path), "write", *words):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["lognormal:", "lognormal:1500", "lognormal:x,1", "lognormal:1500,0", "lognormal:1500,nan",
     "lognormal:1500,9", "lognormal:1500,1,200", "lognormal:0,1", "lognormal:1500,1,2,3", "/no/such/file"],
)  # fmt: skip
def test_a_malformed_value_is_refused_with_an_example(text):
    with pytest.raises(HexiError, match=r"lognormal:1500,1\.2"):
        read_documents(text)


@given(st.integers(1, 300), RANDOMS)
@examples(30)
def test_the_part_of_documents_longer_than_a_sequence(seq_length, random):
    documents = histogram(random)
    each = [
        length
        for length, count in zip(documents.lengths, documents.counts, strict=True)
        for _ in range(int(count))
    ]
    assert documents.longer_than(seq_length) == pytest.approx(np.mean(np.array(each) > seq_length))


@pytest.mark.parametrize(
    ("lengths", "counts"), [((), ()), ((0, 3), (1, 1)), ((3, 2), (1, 1)), ((3,), (0,)), ((3, 3), (1, 1))]
)
def test_documents_are_checked(lengths, counts):
    with pytest.raises(HexiError, match="document lengths"):
        Documents(lengths, counts)


def test_jobs_with_equal_documents_are_equal():
    first, second = (read_documents("lognormal:1500,1.2") for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first is not second
