"""What the kernels of all architectures share; no architecture knowledge lives here."""
