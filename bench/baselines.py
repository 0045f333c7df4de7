"""The contenders: flash4, its peers behind one interface, and what the machine can do at most."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bench.protocol import Entry, describe, measure
from bench.report import SUBJECT
from bench.shapes import Cell


@dataclass(frozen=True)
class Inputs:
    """One set of inputs in (batch, seqlen, heads, head_dim), shared by all contenders."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None


def make_inputs(
    cell: Cell, sets: int, direction: str, seed: int, device: str = "cuda"
) -> list[Inputs]:
    """Return random normal bfloat16 inputs.

    Never zeros or constants: a power-limited GPU multiplies those faster than real data.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, dim: int) -> torch.Tensor:
        shape = (cell.batch, cell.seqlen, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    return [
        Inputs(
            draw(cell.heads_q, cell.d),
            draw(cell.heads_kv, cell.d),
            draw(cell.heads_kv, cell.dv),
            draw(cell.heads_q, cell.dv) if direction == "backward" else None,
        )
        for _ in range(sets)
    ]


class Contender:
    """One implementation of attention.

    Subclasses say whether they can run here (`available`), and turn tensors into a call
    without arguments (`bind`), so that nothing but the implementation's own call is timed.
    """

    name = ""

    def available(self) -> str | None:
        """Return why this contender cannot run on this machine, or None."""
        return None

    def context(self) -> AbstractContextManager:
        """Return what has to surround the calls; entered once around many."""
        return nullcontext()

    def bind(
        self, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], Any]:
        """Return the forward call on these tensors."""
        raise NotImplementedError

    def output(self, raw: Any) -> torch.Tensor:
        """Return the output in (batch, seqlen, heads, head_dim) from what a bound call returned."""
        return raw[0] if isinstance(raw, tuple) else raw

    def prepare(self, cell: Cell, inputs: Inputs, direction: str = "forward") -> Callable[[], Any]:
        """Return the call to time: the forward, or the backward of a graph that is built here."""
        if direction == "forward":
            return self.bind(cell, inputs.q, inputs.k, inputs.v)
        leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        out = self.output(self.bind(cell, *leaves)())
        if out.grad_fn is None:
            raise NotImplementedError(f"{self.name}: the output does not require a gradient")
        # autograd.grad, not out.backward: accumulating into .grad would add kernels of torch's own.
        return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

    def results(self, raw: Any, direction: str) -> tuple[torch.Tensor, ...]:
        """Return (out,) or (dq, dk, dv) from what a prepared call returned."""
        return (self.output(raw),) if direction == "forward" else tuple(raw)


class _Package(Contender):
    """A function `flash_attn_func(q, k, v, causal=...)` of an installed package."""

    module = ""

    @functools.cached_property
    def _found(self) -> tuple[Callable | None, str | None]:
        if not torch.cuda.is_available():
            return None, "no CUDA device"
        try:
            return importlib.import_module(self.module).flash_attn_func, None
        except Exception as error:
            return None, describe(error)

    def available(self) -> str | None:
        return self._found[1]

    def bind(self, cell, q, k, v):
        function, reason = self._found
        if function is None:
            raise RuntimeError(reason)
        return functools.partial(function, q, k, v, causal=cell.causal)


class Flash4(_Package):
    """This package."""

    name = SUBJECT
    module = "flash4"


class FlashAttention4(_Package):
    """flash-attn-4, the CuTe DSL kernels of the flash-attention authors; returns (out, lse)."""

    name = "fa4"
    module = "flash_attn.cute"


class _Sdpa(Contender):
    """One backend of torch's scaled_dot_product_attention."""

    backend = ""

    def available(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        if self.backend == "CUDNN_ATTENTION" and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return None

    def context(self) -> AbstractContextManager:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, self.backend)])

    def bind(self, cell, q, k, v):
        # (batch, heads, seqlen, head_dim) views of the same memory that the others read.
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            q,
            k,
            v,
            is_causal=cell.causal,
            enable_gqa=cell.heads_q != cell.heads_kv,
        )

    def output(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.transpose(1, 2)


class Cudnn(_Sdpa):
    """cuDNN's fused attention through torch."""

    name = "cudnn"
    backend = "CUDNN_ATTENTION"


class FlashAttention2(_Sdpa):
    """FlashAttention-2 as torch carries it."""

    name = "fa2"
    backend = "FLASH_ATTENTION"


class FromCallable(Contender):
    """A contender made from `factory(q, k, v)`, which returns the call to time."""

    def __init__(self, name: str, factory: Callable[..., Callable[[], Any]]):
        self.name = name
        self._factory = factory

    def bind(self, cell, q, k, v):
        """Return what the factory makes of these tensors."""
        return self._factory(q, k, v)


CONTENDERS: dict[str, type[Contender]] = {
    c.name: c for c in (Flash4, FlashAttention4, Cudnn, FlashAttention2)
}
PEERS = tuple(name for name in CONTENDERS if name != SUBJECT)


def select(text: str) -> list[Contender]:
    """Return the contenders of a comma-separated list of names."""
    names = list(dict.fromkeys(filter(None, (w.strip() for w in text.split(",")))))
    unknown = [n for n in names if n not in CONTENDERS]
    if unknown or not names:
        raise ValueError(f"contenders are {', '.join(CONTENDERS)}; got {text!r}")
    return [CONTENDERS[n]() for n in names]


def measure_ceilings(device: Any, budget_s: float = 0.6) -> dict[str, float]:
    """Return what the machine reaches now: a bf16 matrix product in TFLOP/s, a copy in GB/s."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    entries = [
        Entry("gemm", (lambda: torch.matmul(a, b, out=product),)),
        Entry("copy", (lambda: target.copy_(source),)),
    ]
    timings = measure(entries, device, budget_s).timings
    gemm, copy = (timings[name].summary() for name in ("gemm", "copy"))
    moved = 2 * source.numel() * source.element_size()
    return {
        "gemm_tflops": round(2 * n**3 / gemm["median_us"] / 1e6, 1),
        "gemm_spread": gemm["spread"],
        "copy_gbs": round(moved / copy["median_us"] / 1e3, 1),
        "copy_spread": copy["spread"],
    }
