"""Megatron's command-line options in a job with a plan: supported, refused or without influence.

The package works without torch.

- `parser` parses words as the parser of the assumed `release` of Megatron does.
- `refusals` joins the modules `rules_*`, which list the options that a plan supports or refuses, with
  reasons; `refusals` applies the table.
- `registry` assigns every option of Megatron to a class.
- `plan_job` checks a job against a plan; `job_terms` has the flags that a plan sets or replaces.
"""
