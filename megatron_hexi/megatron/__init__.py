"""The only package that knows Megatron: arguments, patches and entry points."""
