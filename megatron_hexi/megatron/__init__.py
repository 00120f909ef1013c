"""Megatron under a plan: arguments, patches and entry points; training imports Megatron only here."""
