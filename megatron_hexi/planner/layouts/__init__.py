"""Layouts of domains during a search (`layout`), and their times (`trial`, `measured`)."""
