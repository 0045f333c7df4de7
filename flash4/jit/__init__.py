"""Compilation of kernels without data or a GPU, and caches of what was compiled."""
