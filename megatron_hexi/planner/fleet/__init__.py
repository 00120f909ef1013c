"""The units that a plan is made of (`units`), and their best rates and memory (`rates`)."""
