"""A backward from one call: the kernels before, in and after it, one launch after the other.

What it needs for itself is one tensor, the workspace, which is cut here; see ``launch_facts.BackwardLaunch.workspace``.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32, Int64

from flash4.common.kernels import load_kernel
from flash4.common.launch_arguments import fake_whole_backward
from flash4.common.launch_facts import COUNTERS, WORDS
from flash4.passes.bwd_config import WholeConfig
from flash4.passes.bwd_finish import FinishBackward
from flash4.passes.bwd_prepare import PrepareBackward

FLOATS_ALIGN = 16  # bytes; of bulk copies


class WholeBackward:
    """Host code alone: it has no kernel of its own."""

    def __init__(self, config: WholeConfig):
        self.config = config
        self.main = load_kernel(config.kernel, config.main)
        prepare, finish = config.passes
        self.prepare, self.finish = PrepareBackward(prepare), FinishBackward(finish)

    def fake_arguments(self):
        """Arguments of ``__call__`` with symbolic sizes and strides, for compiling without data."""
        c = self.config
        return fake_whole_backward(c.main, BFloat16 if c.main.bf16 else Float16, c.dlse)

    @cute.jit
    def __call__(
        self,
        tensors,  # q, k, v, out, dout (B, S, H, D), lse (B, H, S), dq, dk, dv; workspace (numbers,); ..
        numbers: tuple,  # Float32 or Int32, named by the config of the main kernel; the scale first
        section: Int32,
        stream,
    ):
        """Launch three kernels."""
        workspace = tensors[9]

        def view(name, first, shape):
            return part_of(workspace, name, first, shape)

        prepare, main, finish = self.config.parts(tensors, (numbers, section), view, Int64)
        self.prepare(prepare, stream)
        self.main(main, numbers, section, stream)
        self.finish(finish, numbers[0], stream)


def part_of(workspace, name: str, first, shape):
    """Part of the workspace from number ``first`` on, compact; counters and words of tiles are int32."""
    pointer, divisor = workspace.iterator + first, FLOATS_ALIGN // 4
    if name in WORDS:
        pointer = cute.recast_ptr(pointer, dtype=Int32)
    if name in COUNTERS:
        divisor = 1
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, cute.assume(Int64(strides[0]) * size, divby=divisor))
    return cute.make_tensor(
        pointer.align(4 * divisor), cute.make_layout(shape, stride=tuple(strides))
    )
