"""Compiling before the first call, in parallel, also on a machine without a GPU."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from flash4 import interface, ops
from flash4.dispatch import ARCHITECTURES, NEVER_RUN, plan_backward, plan_forward
from flash4.jit import farm
from flash4.jit.cache import CACHE
from flash4.problem import LENGTHS, AttentionProblem

LENGTHS_TRIED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
TOUCHED_ROWS = 256  # of the small call that loads a kernel
_OPERANDS = ("q", "k", "v")


@dataclass(frozen=True)
class Precompiled:
    """What ``precompile`` did. ``print(it)`` sums it up.

    Attributes:
        kernels: (kernel, config, architecture) of all kernels that the calls need.
        compiled: how many of them were compiled; the others were there.
        failed: (kernel, config, architecture, why) of what could not be compiled.
        loaded: how many calls are ready in this process: they can be captured into a graph.
        seconds: how long it took.
    """

    kernels: tuple
    compiled: int
    failed: tuple
    loaded: int
    seconds: float

    def __str__(self):
        lines = [
            f"{len(self.kernels)} kernels, {self.compiled} compiled, {len(self.failed)} failed, "
            f"{self.loaded} calls loaded, {self.seconds:.1f} s"
        ]
        lines += [
            f"  {kernel} {config} for {arch}: {why}" for kernel, config, arch, why in self.failed
        ]
        return "\n".join(lines)


def precompile(
    calls: Iterable[dict], *, arch=None, backward=False, any_length=False, workers=None,
    memory_gib=None, progress=None,
) -> Precompiled:  # fmt: skip
    """Compile what calls need into the disk cache, in parallel, and load it if this machine has the GPU.

    Afterwards such calls compile nothing, and on this machine they may be captured into a CUDA graph at once.

    Args:
        calls: keywords of ``flash_attn_func`` or ``flash_attn_varlen_func`` for each, q, k and v among them; tensors on the
            meta device will do: only shapes and types matter.
        arch: target such as "sm_90a"; default the GPU of q, or the current one for tensors that are on none.
        backward: compile their gradients too.
        any_length: compile what any number of queries and keys would need, with the other sizes as given.
        workers: most processes at a time; default one for each CPU, and what fits into the memory.
        memory_gib: memory that all processes together may take; default half of what is free.
        progress: called with (kernels done, of how many, text); True prints to stderr.

    Returns:
        What was done; a kernel that does not compile is listed there, not raised.

    Raises:
        ValueError: no ``arch`` and no GPU; a call without q, k and v; a CUDA graph is being captured.
        TypeError: as ``flash_attn_func``.
        NotImplementedError: as ``flash_attn_func``.
    """
    began, calls = time.perf_counter(), [dict(call) for call in calls]
    report = _printed if progress is True else progress or (lambda done, total, text: None)
    if ops.is_capturing():
        raise ValueError("precompile must be called before a CUDA graph is captured, not within")
    keys, prepared = {}, []
    for call in calls:
        missing = [name for name in _OPERANDS if not isinstance(call.get(name), torch.Tensor)]
        if missing:
            raise ValueError(
                f"a call needs tensors q, k and v, this one lacks {', '.join(missing)}"
            )
        target, device = _target(call["q"], arch)
        needed = _kernels(call, target, backward, any_length)
        keys |= dict.fromkeys(needed)
        prepared.append((call, device, needed))
    failed, compiled = _compile(list(keys), workers, memory_gib, report)
    bad = {entry[:3] for entry in failed}
    loaded = 0
    for call, device, needed in prepared:
        if device is not None and not bad & set(needed):
            loaded += _touch(call, device, backward)
    seconds = time.perf_counter() - began
    return Precompiled(tuple(keys), compiled, tuple(failed), loaded, seconds)


def _printed(done: int, total: int, text: str):
    print(f"flash4: {done} of {total}: {text}", file=sys.stderr, flush=True)


def _target(q, arch: str | None) -> tuple[str, torch.device | None]:
    """(architecture, device to load on or None)."""
    device = q.device if q.is_cuda else None
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    own = None
    if device is not None:
        try:
            own, _ = ops.device_facts(device.index)
        except NotImplementedError:
            if arch is None:
                raise
    known = {*ARCHITECTURES.values(), *(f"sm_{a}{b}a" for a, b in NEVER_RUN)}
    if arch is None and own is None:
        raise ValueError(
            f"this machine has no GPU: name the target with arch=, one of {sorted(known)}"
        )
    if arch is not None and arch not in known:
        raise ValueError(f"arch is {arch!r}; supported are {sorted(known)}")
    return arch or own, device if arch in (None, own) else None


def _kernels(call: dict, arch: str, backward: bool, any_length: bool) -> list[tuple]:
    """(kernel, config, architecture) of all that a call launches."""
    given = {name: value for name, value in call.items() if name not in (*_OPERANDS, "return_lse")}
    tensors = [call[name] for name in _OPERANDS]
    problem = AttentionProblem.of_call(*tensors, interface.options_of(*tensors, **given))
    problems = [problem]
    if any_length:
        problems += [
            dataclasses.replace(problem, seqlen_q=q, seqlen_k=k)
            for q in LENGTHS_TRIED
            for k in (1, 128, 1024, 16384)
        ]
    found = {}
    for one in problems:
        if one.is_empty:
            continue
        plan = plan_forward(one, arch, interface.MULTIPROCESSORS)
        found[plan.kernel, plan.config, plan.arch] = None
        if backward:
            kernels = plan_backward(one, arch, interface.MULTIPROCESSORS).kernels
            found |= dict.fromkeys(kernels)
    return list(found)


def _compile(keys, workers, memory_gib, report: Callable):
    """(failures, number of compilations) after all keys are in the disk cache or, without one, in memory."""
    failed, counted = [], [0, 0]
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    own = [key for key in keys if _names_mods(key) or CACHE.folder_obstacle() is not None]
    rest = [key for key in keys if key not in own and not CACHE.contains(*key)]
    there = [key for key in rest if CACHE.on_disk(*key)]
    count = farm.worker_count(len(rest), workers, memory)

    def done(key, problem, compiled):
        counted[0] += 1
        counted[1] += compiled
        if problem is not None:
            failed.append((*key, problem))
        state = "failed" if problem else "compiled" if compiled else "was there"
        report(counted[0], len(own) + len(rest), f"{key[0]} for {key[2]} {state}")

    for key in there:
        done(key, None, False)
    missing = [key for key in rest if key not in there]
    if missing:
        farm.compile_all(missing, min(count, len(missing)), done)
    for key in own:  # a mod is a callable of this process
        before = CACHE.compiles
        try:
            CACHE.get(*key)
            done(key, None, CACHE.compiles > before)
        except RuntimeError as error:
            done(key, str(error), False)
    return failed, counted[1]


def _names_mods(key) -> bool:
    return bool(getattr(key[1], "score_mod", 0) or getattr(key[1], "mask_mod", 0))


def _touch(call: dict, device, backward: bool) -> bool:
    """Run a call with the same kernels, as small as may be, so that the driver has loaded them; whether there is one."""
    if call.get("aux_tensors"):  # what a mod reads there is not known
        return False
    own = ops.device_facts(device.index)[0]
    needed = _kernels(call, own, backward, False)
    for rows, batch in ((TOUCHED_ROWS, 1), (None, 1), (None, None)):
        small = _small_call(call, device, rows, batch)
        if _kernels(small, own, backward, False) == needed:
            _run(small, device, backward)
            return True
    return False


def _small_call(call: dict, device, rows: int | None, batch: int | None) -> dict:
    """A call on zeros of so many rows and batch entries; None is as many as given."""
    small, length = dict(call), {}
    of_q = call.get("cu_seqlens_q")
    given = call["q"].shape[0] if of_q is None else of_q.shape[0] - 1
    batch = given if batch is None else batch
    for name in _OPERANDS:
        x = call[name]
        packed = x.ndim == 3
        n = -(-x.shape[0] // max(given, 1)) if packed else x.shape[1]
        n = length[name] = n if rows is None else min(rows, n)
        shape = (batch * n, *x.shape[1:]) if packed else (batch, n, *x.shape[2:])
        small[name] = torch.zeros(shape, dtype=x.dtype, device=device)
    for name in LENGTHS:
        if call.get(name) is not None:
            n = length[name[-1]]
            count = torch.arange(batch + 1) if name.startswith("cu") else torch.ones(batch)
            small[name] = (n * count).to(device, torch.int32)
    for name in ("learnable_sink", "alibi_slopes"):
        x = call.get(name)
        if x is not None:
            shape = (batch, x.shape[1]) if x.ndim == 2 else x.shape
            small[name] = torch.zeros(shape, dtype=x.dtype, device=device)
    return small


def _run(small: dict, device, backward: bool):
    varlen = any(small.get(name) is not None for name in LENGTHS)
    function = interface.flash_attn_varlen_func if varlen else interface.flash_attn_func
    operands = [small.pop(name).requires_grad_(backward) for name in _OPERANDS]
    small.pop("out", None)
    small.pop("return_lse", None)
    with torch.cuda.device(device), torch.set_grad_enabled(backward):
        out = function(*operands, **small)
        if backward:
            torch.autograd.grad(out, operands, torch.zeros_like(out))
        torch.cuda.synchronize()
