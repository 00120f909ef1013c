"""What runs inside a rank of the testbed: its limits, its pace, and the load that measures both."""
