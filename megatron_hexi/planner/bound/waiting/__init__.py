"""The least in which given groups, which wait for each other, hold the sequence (`together`, `beside`).

A linear program (`group_program`): what groups may hold (`group_reach`) and what they take (`group_lines`,
`lines`; `setting`), in rows (`rows`, `memory_rows`, `pass_rows`, `step_rows`; `key_times`, `blocks`,
`arrivals`, `pass_end`).
"""
