"""Triton kernels of the fused path. Imported only where a CUDA device is used."""
