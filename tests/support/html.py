"""An HTML page taken apart: its tables, its words, what it refers to, and whether it is well formed."""

from __future__ import annotations

from html.parser import HTMLParser

_EMPTY = {"meta", "link", "br"}
_REFERENCES = {"src", "href", "xlink:href", "action", "data", "srcset", "poster"}


class Page(HTMLParser):
    """A page.

    Attributes:
        tables: of each section that has one, its rows of cells, the heads included.
        sections: their names, in order.
        title: of the page.
        references: everything that could be fetched.
        names: every ``id``.
        labels: what stands for those who do not see a drawing.
        words: all text.
    """

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.sections: list[str] = []
        self.title = ""
        self.references: list[str] = []
        self.names: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.references += [given[name] for name in _REFERENCES & set(given)]
        if "id" in given:
            self.names.append(given["id"])
        if given.get("role") == "img":
            self.labels.append(given["aria-label"])
        if tag == "section":
            self.sections.append(given["id"])
        if tag == "tr":
            self.tables.setdefault(self.sections[-1], []).append([])
        if tag in ("td", "th"):
            self.tables[self.sections[-1]][-1].append("")
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data.strip())
        if self.open and self.open[-1] == "title":
            self.title += data
        if "table" in self.open and {"td", "th"} & set(self.open):
            self.tables[self.sections[-1]][-1][-1] += data
