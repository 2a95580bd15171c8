"""Triton kernels; imported only if a CUDA device is used."""
