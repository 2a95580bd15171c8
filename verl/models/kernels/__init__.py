"""Triton kernels of training. Imported only where a CUDA device is used."""
