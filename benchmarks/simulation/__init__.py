"""The evaluation: plans beside baselines, bounds and ceilings, over a suite of clusters. No GPU is needed."""
