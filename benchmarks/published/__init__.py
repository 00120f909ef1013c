"""Tables that others published, predicted by the cost model."""
