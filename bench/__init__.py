"""Benchmarks: flash4 beside its peers, interleaved, on the machine at hand."""
