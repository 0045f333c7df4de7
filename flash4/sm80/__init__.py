"""Ampere kernels, and those of newer cards that have none of their own: mma.sync, cp.async and ldmatrix only."""
