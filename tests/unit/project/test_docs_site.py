"""The site builds without a warning, which checks links and anchors too, and needs no network to be read."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

REPOSITORY = Path(__file__).parents[3]


def _build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(docs), str(out)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    built = _build(REPOSITORY / "docs", out)
    assert built.returncode == 0, built.stderr
    return out


class _Page(HTMLParser):
    """Addresses that a browser loads by itself, links that a reader may follow, and where links may lead."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or "")
        if tag == "a":
            self.links.append(given.get("href") or "")
        self.addresses += [given[name] or "" for name in ("src", "srcset", "poster") if name in given]
        if tag == "link":
            self.addresses.append(given.get("href") or "")


def _read(file: Path) -> _Page:
    page = _Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


def test_every_page_is_built(site):
    pages = {
        path.relative_to(REPOSITORY / "docs").with_suffix(".html")
        for path in (REPOSITORY / "docs").rglob("*.md")
    }
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_every_page_is_listed_as_markdown(site):
    listed = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    docs = REPOSITORY / "docs"
    assert {f"_sources/{page.relative_to(docs)}" for page in docs.rglob("*.md")} == set(listed)
    for page in listed:
        assert (site / page).read_text(encoding="utf-8").lstrip().startswith("# "), page


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    for page in pages:
        loaded = _read(page)
        assert loaded.addresses, page
        for address in loaded.addresses:
            assert not urlsplit(address).netloc, f"{page.name} loads {address}"
            assert (page.parent / urlsplit(address).path).exists() or address.startswith("data:"), address


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {page: _read(page) for page in site.rglob("*.html")}
    followed = 0
    for page, read in pages.items():
        for link in read.links:
            where = urlsplit(link)
            if where.scheme in ("http", "https"):
                assert where.netloc, f"{page.name}: {link}"
                continue
            target = (page.parent / where.path).resolve() if where.path else page
            assert target.exists(), f"{page.name}: {link}"
            if where.fragment and target in pages:
                assert where.fragment in pages[target].anchors, f"{page.name}: {link}"
            followed += 1
    assert followed > 100


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_beside_the_site_leads_somewhere(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not urlsplit(link).scheme]
    assert links or name == "CHANGELOG.md"
    for link in links:
        assert (REPOSITORY / urlsplit(link).path).exists(), link


def test_style_sheets_load_nothing_from_elsewhere(site):
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        assert "url(http" not in text, sheet
        assert "url(//" not in text, sheet
        assert "@import" not in text, sheet


def test_each_dead_link_fails_the_build(tmp_path):
    dead = {
        "[gone](nowhere.md)": "nowhere.md",
        "[gone](index.md#no-heading)": "no-heading",
        "![gone](images/nowhere.png)": "images/nowhere.png",
    }
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text((REPOSITORY / "docs" / "conf.py").read_text())
    (docs / "static").mkdir()
    (docs / "static" / "site.css").write_text("")
    (docs / "index.md").write_text("\n\n".join(["# Home", *dead]))
    built = _build(docs, tmp_path / "site")
    assert built.returncode == 1
    warnings = [line for line in built.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == len(dead)
    for named in dead.values():
        assert [named in warning for warning in warnings].count(True) == 1
