"""Faster engines, all optional: CUDA graphs, compiled trunks, Triton kernels. `agscl.training.engine` imports them."""
