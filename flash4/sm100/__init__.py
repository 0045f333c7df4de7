"""Kernels for Blackwell data-centre GPUs (compute capability 10.0)."""
