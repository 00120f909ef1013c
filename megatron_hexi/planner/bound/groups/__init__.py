"""The least that a whole group takes: by its units' best rates (`group_rates`), and with whole heads on each
site (`group_times`; `site_times`, `inside`, `group_memory`, `least_sum`).
"""
