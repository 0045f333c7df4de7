"""flash4: exact attention for NVIDIA GPUs, every kernel in the CuTe DSL, compiled on first use and cached."""

from flash4.ahead import Precompiled, precompile
from flash4.availability import Availability, is_available
from flash4.interface import flash_attn_func, flash_attn_varlen_func, redone_tiles
from flash4.sdpa import TorchPlan, explain, scaled_dot_product_attention

__all__ = [
    "Availability",
    "Precompiled",
    "TorchPlan",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "is_available",
    "precompile",
    "redone_tiles",
    "scaled_dot_product_attention",
]
__version__ = "0.1.0"
