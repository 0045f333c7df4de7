"""flash4: exact attention for NVIDIA GPUs, every kernel in the CuTe DSL, compiled on first use and cached."""

from flash4.interface import explain, flash_attn_func, flash_attn_varlen_func, redone_tiles

__all__ = ["explain", "flash_attn_func", "flash_attn_varlen_func", "redone_tiles"]
__version__ = "0.1.0"
