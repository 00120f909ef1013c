"""Starts the ranks of one node, round after round.

`agent`: PyTorch's elastic agent. `ranks`: a rank's entry point, and the process that ranks are forked from.
`keeper`: serves this node's copies of the training's state, and fetches its neighbour's.
"""
