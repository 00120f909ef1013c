"""Sphinx's settings: ``make docs`` builds the site into build/site, offline, with warnings as errors."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import megatron_hexi

project = "megatron-hexi"
author = "the authors of megatron-hexi"
copyright = author
version = release = megatron_hexi.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_llms_txt"]
autodoc_default_options = {"members": True, "imported-members": True, "exclude-members": "__new__, __init__"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
myst_heading_anchors = 4  # links to headings are checked, as those to pages are
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries, and of our own that are not exported
highlight_language = "none"  # of blocks that name none
smartquotes_action = "q"  # quotes only: a flag's two hyphens are no dash

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = True  # every page lies in _sources as Markdown, where llms.txt sends its readers
html_sourcelink_suffix = ""
llms_txt_uri_template = "_sources/{docname}.md"  # relative: the site may lie anywhere
llms_txt_summary = "Long-context training on mixed GPU clusters, as a plugin for Megatron-LM"

_REPOSITORY = Path(__file__).resolve().parents[1]


def setup(app: Sphinx) -> None:
    """Add what Sphinx does not do by itself."""
    app.connect("doctree-read", _name_folders)


def _name_folders(app: Sphinx, doctree: nodes.document) -> None:
    """A link to a folder of the repository becomes its text: the site has files to show, and no folders."""
    page = Path(app.env.doc2path(app.env.docname))
    for link in list(doctree.findall(pending_xref)):
        target = (page.parent / link["reftarget"]).resolve()
        if link["reftype"] == "myst" and target.is_dir() and target.is_relative_to(_REPOSITORY):
            link.replace_self(link.children)
