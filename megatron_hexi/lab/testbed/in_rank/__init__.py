"""Code that runs in each rank of the testbed: memory limit, pacing, and the load that measures both."""
