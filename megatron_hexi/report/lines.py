"""A report of several parts, for a terminal and for a notebook."""

from __future__ import annotations

from rich.console import Group
from rich.jupyter import JupyterMixin


class Report(JupyterMixin, Group):
    """Lines and tables one below the other: ``rich`` prints them, and a notebook shows them as HTML."""

    def _repr_html_(self) -> str:
        """Return what Jupyter shows, for notebooks that read no bundles of types."""
        return str(self._repr_mimebundle_([], [])["text/html"])
