"""Plans as a search moves them (`layout`), and what the cost model says of them (`trial`, `measured`)."""
