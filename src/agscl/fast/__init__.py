"""Faster ways to train, all optional: CUDA graphs, compiled trunks, kernels."""
