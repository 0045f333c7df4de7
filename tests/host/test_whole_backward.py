"""Host code of a whole backward, on a CPU: where parts of the workspace lie, and what a compiled function refuses."""

import gc

import cutlass
import cutlass.cute as cute
import pytest
import torch
import tvm_ffi
from cutlass import AddressSpace, BFloat16, Float32, Int32, Int64

from flash4.dispatch import plan_backward
from flash4.jit.compile import launcher
from flash4.passes.bwd_whole import part_of
from flash4.problem import AttentionProblem

CONFIGS = {
    f"{kind} {arch}": (arch, facts)
    for arch in ("sm_90a", "sm_80", "sm_100a")
    for kind, facts in (("plain", {}), ("turns", {"causal": True, "deterministic": True}))
}
CONFIGS["sequences sm_90a"] = ("sm_90a", {"causal": True, "cu_q": True, "cu_k": True})
OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"


def fake(dtype, shape, divisibility, align):
    """A CPU tensor whose last mode is contiguous."""
    strides = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[1:]), 1)
    generic = AddressSpace.generic
    return cute.runtime.make_fake_tensor(
        dtype, shape, stride=strides, memspace=generic, assumed_align=align
    )


class Marks:
    """Writes a number into the last place of each part, and one into the midst of the sums and of tiles."""

    def __init__(self, config):
        self.config = config

    @cute.jit
    def __call__(self, tensors):
        workspace = tensors[9]

        def view(name, first, shape):
            return part_of(workspace, name, first, shape)

        facts = ((Float32(1.0), Int32(132))[: len(self.config.main.numbers)], Int32(1))
        parts = self.config.parts(tensors, facts, view, Int64)
        (*_, lse, delta, sums), counters, found = self.split(parts[0])
        batch, heads, blocks, count = sums.shape
        sums[batch - 1, heads - 1, blocks - 1, count - 1] = Float32(1.0)
        sums[batch - 1, 2, 1, 5] = Float32(2.0)
        lse[batch - 1, heads - 1, lse.shape[2] - 1] = Float32(3.0)
        delta[batch - 1, heads - 1, delta.shape[2] - 1] = Float32(4.0)
        for counter in counters:
            if cutlass.const_expr(cute.rank(counter) == 4):
                counter[batch - 1, heads - 1, blocks - 1, 1] = Int32(5)
            else:
                counter[0] = Int32(6)
        for tiles in found:
            tiles[1, 3] = Int32(7)
            tiles[tiles.shape[0] - 1, tiles.shape[1] - 1] = Int32(8)

    def split(self, tensors):
        """Those of every call, counters, and tiles that were found, if any are."""
        c = self.config.main
        begin = 6 + c.cu_q
        end = begin + c.turns + c.handed_out
        return tensors[:6], tensors[begin:end], tensors[end : end + c.tiles_found]


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_the_workspace_lie_where_they_are_said_to(name):
    """As the host takes them: ``ops`` reads D there."""
    arch, facts = CONFIGS[name]
    batch, seqlen, heads = 2, 200, 4
    problem = AttentionProblem(torch.bfloat16, batch, seqlen, seqlen, heads, heads, 64, 64, **facts)
    plan = plan_backward(problem, arch, 132)
    ((_, whole, _),) = plan.kernels
    sizes = [cute.sym_int() for _ in range(4)]
    packed = plan.config.cu_q
    rows = [fake(BFloat16, sizes, 8, 16) for _ in range(8)]
    lengths = tuple(fake(Int32, (cute.sym_int(),), 1, 4) for _ in range(2 * packed))
    lse = fake(Float32, (sizes[0], sizes[2], sizes[1]), 1, 4)
    workspace = fake(Float32, (cute.sym_int64(),), 1, 16)
    fakes = (*rows[:5], lse, *rows[5:], workspace, *lengths)
    compiled = cute.compile(Marks(whole), fakes, options=OPTIONS)
    entries, n = (1, batch * seqlen) if packed else (batch, seqlen)
    x = torch.zeros(entries, n, heads, 64, dtype=torch.bfloat16)
    numbers = torch.zeros(plan.workspace_bytes // 4)
    lengths = [torch.tensor([0, 100, n], dtype=torch.int32)] * (2 * packed)
    compiled((*[x] * 5, torch.zeros(entries, heads, n), *[x] * 3, numbers, *lengths))
    blocks, tiles = (
        n // tile + batch + 2 if packed else -(-n // tile)
        for tile in (whole.main.tile_m, whole.main.tile_n)
    )
    count = whole.main.tile_m * whole.main.dq_width
    places = whole.main.workspace(entries * heads * blocks, entries * heads * tiles)
    ends = {part: first + size - 1 for part, (first, size) in places.items()}
    expected = {(((entries - 1) * heads + 2) * blocks + 1) * count + 5: 2.0}
    expected |= {ends["sums"]: 1.0, ends["lse"]: 3.0, ends["delta"]: 4.0}
    words = numbers.view(torch.int32)
    found = {int(i): float(numbers[i]) for i in numbers[: ends["delta"] + 1].nonzero()}
    assert found == expected
    behind = {int(i): int(words[i]) for i in words.nonzero() if i > ends["delta"]}
    counters = {"next_tile": (places.get("next_tile", (0,))[0], 6)}
    counters["turns"] = (ends.get("turns"), 5)
    expected = dict(value for part, value in counters.items() if part in places)
    if packed:
        expected |= {places["found_tiles"][0] + 16 + 3: 7, ends["found_tiles"]: 8}
    assert behind == expected and ("found_tiles" in places) == packed
    assert len(numbers) == max(ends.values()) + 1 and ("turns" in places) == whole.main.turns


class Nothing:
    """Takes two tensors."""

    @cute.jit
    def __call__(self, tensors, number: Int32):
        pass


def test_what_a_compiled_function_does_not_take_is_a_value_error():
    """The short way of gradients counts on it; see ``launch.PreparedBackward.run``."""
    sizes = [cute.sym_int() for _ in range(3)]
    shape = (*sizes, 64)
    fakes = tuple(fake(BFloat16, shape, 8, 16) for _ in range(2))
    compiled = launcher(cute.compile(Nothing(), fakes, Int32(1), options=OPTIONS))
    assert type(compiled) is tvm_ffi.Function, "without the DSL's wrapper"

    def new(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    x = new(2, 8, 4, 64)
    gc.collect()
    compiled((x, x), 1)
    compiled((x, x[:, :, :1].expand(x.shape)), 1)
    for other in (
        new(2, 9, 4, 64), x.float(), x[0], new(x.numel() + 1)[1:].view(x.shape), new(2, 8, 4, 65)[..., :64],
        new(2, 8, 64, 4).transpose(2, 3), new(1, 1, 1, 1).expand(x.shape),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="Mismatched|Misaligned|Invalid"):
            compiled((x, other), 1)
