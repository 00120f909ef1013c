"""Measures the worth of each mechanism of the planner, by planning without it."""
