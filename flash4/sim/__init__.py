"""Runs the kernels' own schedules on a CPU: their role functions in plain Python, with simulated rings and NumPy verbs."""
