"""A backward to check: a problem, how the gradient of its out lies, and whether the log-sum-exp has one too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import flash4
from flash4.dispatch import gradient_obstacle
from tests.checks import assert_gradients_close
from tests.strategies import Problem

DEVICE = "cuda"
DOUTS = (
    "contiguous",
    "sum",  # as of out.sum(): one number, every stride 0
    "mean over queries",  # stride 0 along the queries
    "heads first",
    "head dim first",  # no stride is 1
    "cut from rows",  # misaligned rows
    "every second",
    "expanded batch",
)


@dataclass(frozen=True)
class GradientCase:
    """One forward and its backward; ``str()`` is the command that repeats it.

    Attributes:
        problem: what is called.
        seed: of its tensors.
        dout: name in ``DOUTS``.
        dlse: the loss is on the log-sum-exp, too.
        deterministic: as in the public function.
    """

    problem: Problem
    seed: int = 0
    dout: str = "contiguous"
    dlse: bool = False
    deterministic: bool | None = False

    def __str__(self) -> str:
        flags = " --dlse" * self.dlse + " --deterministic" * bool(self.deterministic)
        return (
            f'python -m tests.gpu.fuzz_backward --problem "{self.problem}" --seed {self.seed} '
            f'--dout "{self.dout}"{flags}'
        )

    def kernels(self, arch: str) -> list[tuple[str, object, str]]:
        """What the kernel cache is asked for; nothing for an empty problem."""
        problem = self.problem
        keywords = problem.keywords("meta") | {"deterministic": self.deterministic}
        if not all(x.numel() for x in problem.shapes):
            return []
        forward = flash4.explain(*problem.shapes, arch=arch, **keywords)
        plan = flash4.explain(*problem.shapes, arch=arch, backward=True, dlse=self.dlse, **keywords)
        return [(forward.kernel, forward.config, forward.arch), *plan.kernels]

    def gradient_of_out(self, device: str = DEVICE) -> Tensor:
        """Random normal, in its layout."""
        generator = torch.Generator(device).manual_seed(self.seed + 1)
        *batch, seqlen, heads, head_dim = shape = self.problem.out_shape
        packed = not batch
        batch = 1 if packed else batch[0]

        def new(*shape):
            return torch.randn(shape, generator=generator, device=device).to(self.problem.dtype)

        whole = (batch, seqlen, heads, head_dim)
        dout = {
            "contiguous": lambda: new(*whole),
            "sum": lambda: new(1, 1, 1, 1).expand(whole),
            "mean over queries": lambda: new(batch, 1, heads, head_dim).expand(whole),
            "heads first": lambda: new(batch, heads, seqlen, head_dim).transpose(1, 2),
            "head dim first": lambda: new(head_dim, batch, seqlen, heads).permute(1, 2, 3, 0),
            "cut from rows": lambda: new(batch, seqlen, heads, head_dim + 9)[..., 5:-4],
            "every second": lambda: new(batch, 2 * seqlen, heads, head_dim)[:, ::2],
            "expanded batch": lambda: new(1, seqlen, heads, head_dim).expand(whole),
        }[self.dout]()
        dout = dout[0] if packed else dout
        assert dout.shape == shape
        return dout

    def gradient_of_lse(self, device: str = DEVICE) -> Tensor | None:
        """Random normal."""
        if not self.dlse:
            return None
        generator = torch.Generator(device).manual_seed(self.seed + 2)
        *batch, seqlen, heads, _ = self.problem.out_shape
        return torch.randn(*batch, heads, seqlen, generator=generator, device=device)

    def inputs(self, device: str = DEVICE) -> tuple[Tensor, Tensor, Tensor]:
        """Leaves q, k and v, in the problem's layouts."""
        tensors = self.problem.tensors(device, self.seed)
        return tuple(x.detach().requires_grad_() for x in tensors)

    def gradients(self, inputs, device: str = DEVICE) -> tuple[Tensor, ...]:
        """Gradients of the inputs, and of the sinks if there are any, by way of the public function."""
        keywords = self.problem.keywords(device) | {"deterministic": self.deterministic}
        sink = keywords["learnable_sink"]
        leaves = inputs if sink is None else (*inputs, sink.requires_grad_())
        out, lse = self.problem.function(*inputs, return_lse=True, **keywords)
        dout, dlse = self.gradient_of_out(device), self.gradient_of_lse(device)
        outputs, grads = ((out, lse), (dout, dlse)) if self.dlse else (out, dout)
        return torch.autograd.grad(outputs, leaves, grads)

    def check(self, device: str = DEVICE) -> None:
        """Run it among NaNs.

        Raises:
            AssertionError: a gradient is wrong.
        """
        inputs = self.inputs(device)
        poison(device)
        gradients = self.gradients(inputs, device)
        for x, gradient in zip(inputs, gradients, strict=False):
            assert gradient.shape == x.shape and gradient.dtype == x.dtype
        dout, dlse = self.gradient_of_out(device), self.gradient_of_lse(device)
        keywords = self.problem.keywords(device)
        assert_gradients_close(gradients, inputs, dout, dlse=dlse, **keywords)


def poison(device: str = DEVICE) -> None:
    """Leave NaN in the memory that the allocator hands out next, so that what nobody writes shows."""
    blocks = [
        torch.full((size,), torch.nan, device=device)
        for size in (1 << 9, 1 << 12, 1 << 16, 1 << 18, 1 << 18, 1 << 21, 1 << 23, 1 << 24)
    ]
    del blocks


def is_built(problem: Problem, arch: str = "sm_90a") -> bool:
    """Whether a target has gradients of a problem."""
    from flash4.interface import options_of
    from flash4.problem import AttentionProblem

    shapes = problem.shapes
    options = options_of(*shapes, **problem.keywords("meta"))
    return gradient_obstacle(AttentionProblem.of_call(*shapes, options), arch) is None


def requested_bytes(which: str) -> int:
    """Bytes asked of the allocator, which hands out blocks of up to a MiB more."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
