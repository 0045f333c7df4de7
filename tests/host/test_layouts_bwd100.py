"""The Blackwell backward's layouts, descriptors and maps of tensor memory against a model of the PTX ISA, element by element.

What TMA brings, and what threads store of dS, is what the MMAs read, whichever operand is read in two ways; what they write
is what threads load; what ``reduce`` sends is what the kernel after it reads. Nothing runs: layouts are taken while a kernel is traced.
"""

from dataclasses import replace
from functools import cache

import cutlass.cute as cute
import pytest
from cutlass import Float32
from cutlass.memory import SmemAllocator

from flash4.common.fragments import GROUP_NUMBERS, dq_place
from flash4.passes.bwd_config import passes_of
from flash4.sm100 import bwd_math, bwd_ops
from flash4.sm100.bwd import BackwardSm100
from flash4.sm100.bwd_config import TILE_M, BackwardConfig
from flash4.sm100.bwd_graph import CHUNK, ROWS, SLICE
from tests.host import umma_model as model
from tests.host.test_layouts_fwd100 import offset, slice_of
from tests.host.umma_model import Descriptor

CONFIGS = {
    "64/64": BackwardConfig(True, 64, 64, True),
    "128/128": BackwardConfig(True, 128, 128, True),
    "64/128": BackwardConfig(True, 64, 128, True),
    "128/64": BackwardConfig(False, 128, 64, True),
    "128/128, pair": BackwardConfig(True, 128, 128, True, ctas=2),
}


class Probe:
    """Notes layouts of a kernel while it is traced."""

    def __init__(self, config):
        self.config, self.found = config, {}

    @cute.jit
    def __call__(self):
        self.kernel().launch(grid=(1, 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self):
        self.note()

    def note(self):
        """All that the checks below look at."""
        c, layouts = self.config, bwd_ops.smem_layouts(self.config, 2)
        s, dv = bwd_ops.make_mma_s(c), bwd_ops.make_mma_dv(c)
        dk = bwd_ops.make_mma_dk(c)
        pointer = SmemAllocator().allocate(1024, byte_alignment=1024)
        fragments = {
            "k": s.make_fragment_A, "v": s.make_fragment_A, "q": s.make_fragment_B,
            "do": s.make_fragment_B, "qt": dk.make_fragment_B, "dot": dv.make_fragment_B,
            **self.fragments_of_dq(),
        }  # fmt: skip
        if c.ctas == 1:
            fragments["dst"] = dk.make_fragment_A
        for name, fragment in fragments.items():
            layout = layouts[name]
            self._keep(name, layout.outer)
            self.found[name, "swizzle"] = str(layout.inner)
            at = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=bwd_ops.element(c))
            self._keep((name, "fragment"), fragment(cute.make_tensor(at, layout.outer)).layout)
        for name in ("dk", "dv"):
            self._keep(name, layouts[name].outer)
            self.found[name, "swizzle"] = str(layouts[name].inner)
        tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
        shaped = dv.make_fragment_A(cute.make_tensor(tmem, layouts["p"].outer))
        self._keep("slice", shaped[None, None, 0, 0].layout)
        accumulators = {
            "s": (s, (c.tile_n, c.tile_m)), "dv": (dv, (c.tile_n, c.part_dv)),
            "dk": (dk, (c.tile_n, c.part_d)), **self.products_of_dq(),
        }  # fmt: skip
        for name, (mma, shape) in accumulators.items():
            fragment = mma.make_fragment_C(mma.partition_shape_C(shape))
            self._keep((name, "accumulator"), fragment.layout)
        window = bwd_math.Lanes(tmem, 0)._window(0, CHUNK)
        self._keep("window", window.layout)

    def fragments_of_dq(self):
        """Name of an operand of dQ -> what makes its fragment."""
        dq = bwd_ops.make_mma_dq(self.config)
        return {"ds": dq.make_fragment_A, "kt": dq.make_fragment_B}

    def products_of_dq(self):
        """Name of a product -> its MMA and shape."""
        return {"dq": (bwd_ops.make_mma_dq(self.config), (TILE_M, self.config.tile_d))}

    def _keep(self, name, layout):
        self.found[name] = (layout.shape, layout.stride)


@cache
def traced(name: str) -> dict:
    """Layouts of a config."""
    probe = Probe(CONFIGS[name])
    cute.compile(probe, options="--gpu-arch sm_100a")
    return probe.found


def operands_of(c: BackwardConfig) -> dict:
    """Name -> (rows or columns of M or N in a CTA, depth, distance of groups of MN, whether MN is contiguous)."""
    queries, half_d, half_dv = TILE_M // c.ctas, c.tile_d // c.ctas, c.tile_dv // c.ctas

    def transposed(width, depth):
        return width, depth, depth * 128 if width > 64 else 16, True

    found = {
        "k": (ROWS, c.tile_d, 16, False),
        "v": (ROWS, c.tile_dv, 16, False),
        "q": (queries, c.tile_d, 16, False),
        "do": (queries, c.tile_dv, 16, False),
        "qt": transposed(half_d, TILE_M),
        "dot": transposed(half_dv, TILE_M),
        "kt": transposed(half_d, c.tile_n),
        "ds": (queries, c.tile_n, ROWS * 128, True) if c.ctas == 1 else (64, c.tile_n, 16, True),
    }
    if c.ctas == 1:
        found["dst"] = (ROWS, TILE_M, 16, False)
    return found


def brought(c: BackwardConfig, name: str, mn: int, k: int) -> int:
    """Byte at which TMA, or for dS a thread, puts an element of an operand."""
    rows, depth, _, mn_major = operands_of(c)[name]
    if name not in ("ds", "dst"):
        row, column = (k, mn) if mn_major else (mn, k)
        return model.tma_address(0, row, column, depth if mn_major else rows)
    query, key = (mn, k) if name == "ds" else (k, mn)
    panel = query // 64 if c.ctas == 1 else key // ROWS  # of a pair: of whose keys
    return model.swizzled(panel * c.panel_bytes + key % ROWS * 128 + query % 64 * 2)


def misread(c, found, name, **wrong) -> str | None:
    """The first element for which descriptor, layout and whoever writes it do not agree."""
    rows, depth, leading, mn_major = operands_of(c)[name]
    fragment, layout = found[name, "fragment"], found[name]
    for k_slice in range(depth // SLICE):
        at = slice_of(layout, k_slice)
        start = 16 * offset(fragment, (0, 0, slice_of(fragment, k_slice), 0))
        descriptor = replace(Descriptor(start, leading, 1024), **wrong)
        for mn in range(rows):
            for k in range(SLICE):
                read = model.operand_address(descriptor, mn, k, mn_major)
                laid = model.swizzled(2 * offset(layout, ((mn, k), 0, at, 0)))
                put = brought(c, name, mn, k_slice * SLICE + k)
                if not read == laid == put:
                    return f"{name}, slice {k_slice}, ({mn}, {k}): {read}, {laid}, {put}"
    return None


OPERANDS = [(name, operand) for name, c in CONFIGS.items() for operand in operands_of(c)]


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_mmas_read_what_was_written(name, operand):
    found = traced(name)
    assert found[operand, "swizzle"] == "S<3,4,3>"
    assert misread(CONFIGS[name], found, operand) is None


@pytest.mark.parametrize(
    ("operand", "wrong"),
    [("k", {"stride": 2048}), ("kt", {"leading": 1024}), ("ds", {"leading": 8192}),
     ("dst", {"stride": 512}), ("qt", {"stride": 2048})],
)  # fmt: skip
def test_wrong_descriptors_are_seen(operand, wrong):
    assert misread(CONFIGS["128/128"], traced("128/128"), operand, **wrong)


@pytest.mark.parametrize("name", CONFIGS)
def test_slices_of_p_are_as_threads_store_them(name):
    """Within a slice, 16 values a lane in 8 columns; where slices lie, ``TmemMap`` says."""
    fragment = traced(name)["slice"]
    for k in range(SLICE):
        _, column, half = model.operand_in_tensor_memory(0, k)
        assert offset(fragment, ((0, k), 0)) == 2 * column + half


@pytest.mark.parametrize("name", CONFIGS)
def test_threads_load_what_mmas_write(name):
    c, found = CONFIGS[name], traced(name)
    for acc, columns in (("s", TILE_M), ("dv", c.tile_dv), ("dk", c.tile_d)):
        for row in range(ROWS):
            for column in range(columns):
                at = offset(found[acc, "accumulator"], ((row, column), 0, 0))
                assert at == row << 16 | column
    for row in range(ROWS):
        for column in range(CHUNK):
            assert offset(found["window"], (row, column)) == row << 16 | column


@pytest.mark.parametrize("name", CONFIGS)
def test_sums_of_dq_are_read_where_they_were_put(name):
    """A bijection from lanes and columns of every CTA to the block, which the kernel after it inverts."""
    c, found = CONFIGS[name], traced(name)
    _, finish = passes_of(c, False)
    seen = set()
    half = TILE_M * c.tile_d // 2
    for rank in range(c.ctas):
        for lane in range(ROWS):
            for register in range(c.graph.tmem.dq_columns):
                part, within = divmod(register, c.dq_columns)
                group, number = divmod(within, GROUP_NUMBERS)
                at = (rank * c.dq_steps + part) * c.dq_floats
                at += (group * ROWS + lane) * GROUP_NUMBERS + number
                which, rest = divmod(at, half)
                its_group, rest = divmod(rest, ROWS * GROUP_NUMBERS)
                thread, its_number = divmod(rest, GROUP_NUMBERS)
                row, column = dq_place(finish, which, thread, its_group, its_number)
                seen.add((row, column))
                own = row - rank * (TILE_M // c.ctas)
                there = offset(found["dq", "accumulator"], ((own, column), 0, 0))
                assert there == lane << 16 | register
    assert len(seen) == TILE_M * c.tile_d


def check_stores(found, widths: dict[str, int]):
    """TMA takes the numbers of results of these widths from where threads put them."""
    for result, width in widths.items():
        assert found[result, "swizzle"] == "S<3,4,3>"
        for row in range(ROWS):
            for column in range(width):
                written = model.swizzled(2 * offset(found[result], (row, column, 0)))
                assert written == model.tma_address(0, row, column, ROWS)


@pytest.mark.parametrize("name", CONFIGS)
def test_tma_stores_what_threads_wrote_of_dk_and_dv(name):
    c = CONFIGS[name]
    check_stores(traced(name), {"dk": c.tile_d, "dv": c.tile_dv})


@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_hold_what_barriers_are_told(name):
    c = CONFIGS[name]
    sizes = {b.name: b.nbytes for b in c.graph.buffers}
    told = {"k": c.k_bytes, "v": c.v_bytes, "q": c.q_bytes, "do": c.do_bytes}
    told |= {"kt": c.k_bytes, "qt": c.q_bytes, "dot": c.do_bytes}
    for operand, nbytes in told.items():
        rows, depth, *_ = operands_of(c)[operand]
        assert rows * depth * 2 == nbytes
        assert sizes.get(operand, nbytes) in (nbytes, 2 * nbytes)
    assert sizes["ds"] == c.panels * c.panel_bytes


def test_16_byte_accesses_of_eight_threads_meet_every_bank_once():
    """Of a warp's stores of dS by rows, and of dQ by lanes."""
    ds = {model.swizzled(thread * 128) // 16 % 8 for thread in range(8)}
    dq = {thread * 16 // 16 % 8 for thread in range(8)}
    assert ds == dq == set(range(8))


def test_the_kernel_takes_these_layouts():
    """``BackwardSm100`` reads both majors of an operand from one buffer, unless it is a pair."""
    alone, pair = BackwardSm100(CONFIGS["128/128"]), BackwardSm100(CONFIGS["128/128, pair"])
    names = [{b.name for b in kernel.graph.buffers} for kernel in (alone, pair)]
    assert names[1] - names[0] == {"kt", "qt", "dot"}
