"""Starts the ranks of one node, round after round.

`agent`: PyTorch's elastic agent. `ranks`: a rank's entry point, and the process that ranks are forked from.
`job_store`: the job's store. `rendezvous`: agents meet. `life`: signs that an agent runs, and the spares that
watch them. `keeper`: serves this node's copies of the training's state, and fetches its neighbour's.
"""
