"""Measurements of what the project promises; no part of the package."""
