"""The site builds without a warning, which checks links and anchors too, and needs no network to be read."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

REPOSITORY = Path(__file__).parents[2]


def _build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(docs), str(out)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    built = _build(REPOSITORY / "docs", out)
    assert built.returncode == 0, built.stderr
    return out


class _Loaded(HTMLParser):
    """Addresses that a browser loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [given[name] or "" for name in ("src", "srcset", "poster") if name in given]
        if tag == "link":
            self.addresses.append(given.get("href") or "")


def test_every_page_is_built(site):
    pages = {
        path.relative_to(REPOSITORY / "docs").with_suffix(".html")
        for path in (REPOSITORY / "docs").rglob("*.md")
    }
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.addresses, page
        for address in loaded.addresses:
            assert not urlsplit(address).netloc, f"{page.name} loads {address}"
            assert (page.parent / urlsplit(address).path).exists() or address.startswith("data:"), address


def test_style_sheets_load_nothing_from_elsewhere(site):
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        assert "url(http" not in text, sheet
        assert "url(//" not in text, sheet
        assert "@import" not in text, sheet


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[gone](nowhere.md)", "nowhere.md"),
        ("[gone](index.md#nowhere)", "nowhere"),
        ("![gone](images/nowhere.png)", "images/nowhere.png"),
    ],
)
def test_a_dead_link_fails_the_build(tmp_path, text, warning):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text((REPOSITORY / "docs" / "conf.py").read_text())
    (docs / "static").mkdir()
    (docs / "static" / "site.css").write_text("")
    (docs / "index.md").write_text(f"# Home\n\n{text}\n")
    built = _build(docs, tmp_path / "site")
    assert built.returncode == 1
    assert warning in built.stderr
