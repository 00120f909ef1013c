"""Megatron's options: what each is to a plan. Without torch, so that planning and training decide alike.

- `parser` reads words as Megatron's own parser of the assumed `release` does.
- `rules` and the files that it joins say what a plan carries out or refuses, and why; `refusals` asks them.
- `registry` gives every option of Megatron a class.
- `plan_job` holds a job against a plan; `replaced` says which flags a plan speaks in place of.
"""
