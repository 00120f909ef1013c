"""Megatron's command-line options in a job with a plan: supported, refused or without influence.

The package works without torch.

- `parser` parses words as Megatron's parser of the assumed `release` does. - `rule_table` joins the files
`rules_*`: options that a plan supports or refuses, with reasons; `refusals` applies it. - `registry` gives
every option of Megatron a class. - `plan_job` checks a job against a plan; `job_terms` has the flags that a
plan sets or replaces.
"""
