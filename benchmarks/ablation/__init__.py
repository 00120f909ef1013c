"""What each mechanism of the planner is worth."""
