"""Mistakes in a plan are refused, each by a line with file, line, place, value and remedy."""

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import read_plan
from tests.support.malformed_fields import FIELDS
from tests.support.malformed_layouts import LAYOUTS
from tests.support.mistakes import GOOD, error_of

MISTAKES = [*FIELDS, *LAYOUTS]


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
