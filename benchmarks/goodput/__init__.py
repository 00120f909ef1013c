"""Wall time of a whole job whose ranks and nodes fail: under `megatron_hexi.elastic`, and under torchrun."""
