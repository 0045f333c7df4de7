"""Microbenchmarks of one SM: what the timing model of `flash4.sim` stands on."""
