"""What one attention layer asks of a GPU, exactly: it cannot grow unseen."""

import pytest

from benchmarks.launches import Row, count


@pytest.mark.parametrize(
    "expected",
    [Row(0, 16, 40, 1894.0), Row(32, 16, 46, 2281.2), Row(128, 16, 46, 2281.2)],
    ids=lambda row: f"{row.documents} documents",
)
def test_operations_and_bytes_of_a_layer(expected):
    found = count(expected.documents)
    assert (found.kernels, found.others) == (expected.kernels, expected.others)
    assert found.moved_mib == pytest.approx(expected.moved_mib, abs=0.1)
