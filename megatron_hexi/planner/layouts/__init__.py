"""The layout of a domain during a search (`layout`), and its predicted times (`trial`, `measured`)."""
