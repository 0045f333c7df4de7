"""Hopper (sm_90a) kernels: TMA loads, WGMMA, warp specialisation."""
