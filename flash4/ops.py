"""Execution of planned calls, as PyTorch operators. No policy: plans come from ``dispatch``."""

import functools
from dataclasses import replace

import torch

from flash4.dispatch import Plan, architecture, plan_forward
from flash4.jit.cache import CACHE
from flash4.problem import AttentionProblem

# Stands for a softmax scale of 0: scores vanish beside it, and -inf (masked) times it is still -inf.
TINY_SCALE = 1e-30

_plan = functools.lru_cache(maxsize=4096)(plan_forward)


@functools.cache
def device_facts(index: int) -> tuple[str, int]:
    """(architecture, multiprocessors) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return architecture((properties.major, properties.minor)), properties.multi_processor_count


def layout_obstacle(x) -> str | None:
    """Why TMA cannot address a tensor as it lies, or None."""
    if x.stride(-1) != 1:
        return f"its head_dim stride is {x.stride(-1)}, TMA needs 1"
    element = x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and stride * element % 16:
            return f"a stride of {stride * element} bytes is not a multiple of 16"
    if x.data_ptr() % 16:
        return "its first element is not 16-byte aligned"
    return None


def addressable(x):
    """Return x, or a copy of it where TMA cannot address it; odd strides of size-1 dimensions are made even."""
    if layout_obstacle(x) is not None:
        return x.contiguous() if not x.is_contiguous() else x.clone()
    if any(stride % 8 for stride in x.stride()[:-1]):
        strides = [
            stride if size > 1 else x.shape[-1]
            for size, stride in zip(x.shape, x.stride(), strict=True)
        ]
        return x.as_strided(x.shape, (*strides[:-1], 1))
    return x


def empty_output(q, head_dim_v: int):
    """Output for q: (batch, seqlen_q, heads_q, head_dim_v), in q's memory order of heads and queries."""
    batch, seqlen, heads, _ = q.shape
    if q.stride(1) < q.stride(2) and q.transpose(1, 2).is_contiguous():
        return q.new_empty((batch, heads, seqlen, head_dim_v)).transpose(1, 2)
    return q.new_empty((batch, seqlen, heads, head_dim_v))


def run_forward(q, k, v, out, softmax_scale: float, causal: bool, pack_gqa: bool | None):
    """Write attention into ``out`` and return the log-sum-exp; shapes as in ``flash_attn_func``."""
    problem = AttentionProblem.from_tensors(
        q, k, v, softmax_scale=softmax_scale, causal=causal, pack_gqa=pack_gqa
    )
    lse = q.new_empty((problem.batch, problem.heads_q, problem.seqlen_q), dtype=torch.float32)
    if problem.is_empty:
        out.zero_()
        lse.fill_(float("-inf"))
        return lse
    arch, workers = device_facts(q.device.index)
    plan = _plan(problem, arch, workers)
    with torch.cuda.device(q.device):
        launch = CACHE.get(plan.kernel, plan.config, plan.arch)
        tensors = (addressable(q), addressable(k), addressable(v), out, lse)
        launch(tensors, abs(softmax_scale) or TINY_SCALE, plan.section, workers)
    return lse


def plan_call(q, k, v, arch: str, workers: int, **facts) -> Plan:
    """Plan of a call, with the copies that its tensors need."""
    problem = AttentionProblem.from_tensors(q, k, v, **facts)
    plan = plan_forward(problem, arch, workers)
    copies = ((name, layout_obstacle(x)) for name, x in (("q", q), ("k", k), ("v", v)))
    return replace(plan, copies=tuple(f"{name}: {why}" for name, why in copies if why is not None))


@torch.library.custom_op("flash4::forward", mutates_args=())
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    pack_gqa: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention forward; returns (out, lse)."""
    out = empty_output(q, v.shape[-1])
    return out, run_forward(q, k, v, out, softmax_scale, causal, pack_gqa)


@forward.register_fake
def _(q, k, v, softmax_scale, causal, pack_gqa):
    batch, seqlen, heads, _ = q.shape
    return empty_output(q, v.shape[-1]), q.new_empty((batch, heads, seqlen), dtype=torch.float32)


def _backward(ctx, grad_out, grad_lse):
    raise NotImplementedError(
        "flash4 has no backward for this architecture yet; call the forward under torch.no_grad(), or on detached inputs"
    )


forward.register_autograd(_backward)
