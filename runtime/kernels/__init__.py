"""Triton kernels for CUDA, registered beside the PyTorch operators they replace."""
