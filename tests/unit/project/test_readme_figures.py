"""The README's figures are those of the pages that it links to: the good and the bad half of them."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
README = " ".join((REPOSITORY / "README.md").read_text().split())
RESULTS = REPOSITORY / "docs" / "results"


def test_published_times_are_told_with_median_and_worst():
    page = (RESULTS / "published.md").read_text()
    total = r"^- time, \d+ rows: median ([\d.]+)%, 90th [\d.]+%, worst ([\d.]+)%$"
    found = re.search(total, page, re.MULTILINE)
    assert found is not None
    assert f"median error of {found[1]} % on" in README
    assert f"median error {found[1]} % (" in README
    assert f", {found[2]} % at worst" in README
    assert f"worst {found[2]} %" in README
    longer = re.search(r"takes ([\d.]+)% longer than the fastest published in the median, ([\d.]+)% at", page)
    assert longer is not None
    for kind in ("layouts of dense models", "mixtures of experts"):
        row = re.search(rf"^  - {kind}, \d+ rows: median ([\d.]+)%", page, re.MULTILINE)
        assert row is not None
        assert f"{kind} {row[1]} %" in README
    assert (
        f"{longer[1]} % longer than the one measured to be the fastest in the median, {longer[2]} % at worst"
        in README
    )


def test_one_h200_is_told_by_the_catalogue_and_by_the_probe_s_file():
    """The worst row of the tables, from 16K tokens on and below; all predictions are too fast."""
    page = (RESULTS / "one-gpu.md").read_text()
    worst = {}
    for by, key in (("the catalogue:", "catalogue"), (r"\[what", "probe")):
        rows = []
        for title in re.finditer(rf"^H200\b.*\bby {by}", page, re.MULTILINE):
            table = page[title.start() :].split("\n\n")[1]
            rows += re.findall(r"^\| .*?, (\d+)K.*? \| [\d.]+ \| [\d.]+ \| -(\d+)%", table, re.MULTILINE)
        assert len(rows) == 7
        worst[key] = [
            max(int(error) for length, error in rows if (int(length) >= 16) == is_long)
            for is_long in (True, False)
        ]
    (long, short), (probed_long, probed_short) = worst["catalogue"], worst["probe"]
    rates = f"the catalogue's rates: by up to {long} % from 16K tokens on, by up to {short} % below"
    assert rates in README
    assert f"`hexi probe` measured there: by up to {probed_long} % and {probed_short} %" in README
