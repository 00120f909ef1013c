"""A rank's part in re-planning: posts its times, and swaps plans. Start reading at `replanning`."""
