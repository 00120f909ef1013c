"""The only room that knows Megatron: arguments, patches and entry points."""
