"""The Blackwell forward's layouts, descriptors and maps of tensor memory against a model of the PTX ISA, element by element.

For one CTA and for a pair, for two Q tiles and for one: what TMA brings is what the MMAs read, what they write is what
threads load, what threads store is what the MMAs and TMA read. Nothing runs: layouts are taken while a kernel is traced.
"""

from dataclasses import replace
from functools import cache

import cutlass.cute as cute
import pytest
from cutlass import Float32
from cutlass.memory import SmemAllocator

from flash4.common.numerics import SEVENS, place_in_sevens
from flash4.sm100 import fwd_ops
from flash4.sm100.fwd import ForwardSm100
from flash4.sm100.fwd_config import CHUNK, COLUMN_STEP, KEY_STEP, MMA_ROWS, ForwardConfig
from flash4.sm100.fwd_graph import TMEM_COLUMNS
from tests.host import umma_model as model
from tests.host.umma_model import Descriptor

BASE = {"bf16": True, "causal": True}
PAIR = {**BASE, "ctas": 2}
CONFIGS = {
    "64/64": ForwardConfig(tile_d=64, tile_dv=64, **BASE),
    "128/128": ForwardConfig(tile_d=128, tile_dv=128, **BASE),
    "192/128": ForwardConfig(tile_d=192, tile_dv=128, stages=2, o_slots=1, **BASE),
    "64/128": ForwardConfig(tile_d=64, tile_dv=128, **BASE),
    "128/128, pair": ForwardConfig(tile_d=128, tile_dv=128, stages=6, **PAIR),
    "192/128, pair": ForwardConfig(tile_d=192, tile_dv=128, stages=4, o_slots=1, **PAIR),
    "256/256": ForwardConfig(
        tile_d=256, tile_dv=256, q_tiles=1, tile_n=64, head=32, stages=4, **BASE
    ),
    "256/256, pair": ForwardConfig(tile_d=256, tile_dv=256, q_tiles=1, stages=4, **PAIR),
    "128/256, pair": ForwardConfig(tile_d=128, tile_dv=256, q_tiles=1, stages=4, **PAIR),
}


class Probe:
    """Notes layouts of a kernel while it is traced."""

    def __init__(self, config):
        self.kernel_of = ForwardSm100(config)
        self.found = {}

    @cute.jit
    def __call__(self):
        self.kernel().launch(grid=(1, 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self):
        self.note()

    def note(self):
        """All that the checks below look at."""
        kernel, c = self.kernel_of, self.kernel_of.config
        qk, pv = fwd_ops.make_mma_qk(c), fwd_ops.make_mma_pv(c)
        pointer = SmemAllocator().allocate(1024, byte_alignment=1024)
        *layouts, p_layout = kernel._mma_layouts()
        fragments = (qk.make_fragment_A, qk.make_fragment_B, pv.make_fragment_B)
        for name, layout, fragment in zip("qkv", layouts, fragments):
            self._keep(name, layout.outer)
            self.found[name, "swizzle"] = str(layout.inner)
            self._keep((name, "fragment"), fragment(kernel._smem_tensor(pointer, layout)).layout)
        o_layout = kernel._tma_layouts()[3]
        self._keep("o", o_layout.outer)
        self.found["o", "swizzle"] = str(o_layout.inner)
        tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
        self._keep("p", pv.make_fragment_A(cute.make_tensor(tmem, p_layout)).layout)
        for name, mma, columns in (("s", qk, c.tile_n), ("o in tmem", pv, c.tile_dv)):
            tensor = fwd_ops.accumulator(c, mma, columns, tmem)
            self._keep(name, tensor.layout)
            for kind, copy_of, count in (
                ("load", fwd_ops.tmem_load, CHUNK), ("store", fwd_ops.tmem_store, CHUNK // 2),
            ):  # fmt: skip
                copy, _ = copy_of(tensor, 0, count, 0)
                registers = copy.layout_dst_tv_tiled if kind == "load" else copy.layout_src_tv_tiled
                self._keep((name, kind), registers)
                self.found[name, kind, "tiler"] = [(t.shape, t.stride) for t in copy.tiler_mn]
                self._keep((name, kind, "window"), fwd_ops.tmem_window(tensor, 0, count).layout)

    def _keep(self, name, layout):
        self.found[name] = (layout.shape, layout.stride)


@cache
def traced(name: str) -> dict:
    """Layouts of a config."""
    probe = Probe(CONFIGS[name])
    cute.compile(probe, options="--gpu-arch sm_100a")
    return probe.found


def flat(x) -> list[int]:
    return [x] if isinstance(x, int) else [z for y in x for z in flat(y)]


def offset(layout, coordinate) -> int:
    """Where a layout puts a coordinate; an int for a nested mode counts with the first part fastest."""
    shape, stride = layout
    if isinstance(coordinate, tuple):
        parts = zip(zip(shape, stride, strict=True), coordinate, strict=True)
        return sum(offset(part, at) for part, at in parts)
    total = 0
    for count, step in zip(flat(shape), flat(stride), strict=True):
        total += coordinate % count * step
        coordinate //= count
    return total


def slice_of(layout, k: int):
    """Coordinate of a k-slice, whose mode may be nested."""
    shape = layout[0][2]
    return k if isinstance(shape, int) else (k % shape[0], k // shape[0])


def operand_of(config: ForwardConfig, name: str):
    """(rows, depth, slots, bytes of a slot, distance of groups of MN, whether that is contiguous) of a CTA's operand."""
    c = config
    if name == "q":
        return MMA_ROWS, c.tile_d, c.q_tiles, c.q_bytes, 16, False
    if name == "k":
        return c.tile_n // c.ctas, c.tile_d, c.stages, c.kv_bytes, 16, False
    return c.tile_dv // c.ctas, c.tile_n, c.stages, c.kv_bytes, c.tile_n * 128, True


def misread(config, found, name, **wrong) -> str | None:
    """The first element for which descriptor, layout and TMA do not agree."""
    rows, depth, slots, slot_bytes, leading, mn_major = operand_of(config, name)
    fragment, layout = found[name, "fragment"], found[name]
    for slot in range(slots):
        for k_slice in range(depth // KEY_STEP):
            at = slice_of(layout, k_slice)
            start = 16 * offset(fragment, (0, 0, slice_of(fragment, k_slice), slot))
            descriptor = replace(Descriptor(start, leading, 1024), **wrong)
            for mn in range(rows):
                for k in range(KEY_STEP):
                    read = model.operand_address(descriptor, mn, k, mn_major)
                    laid = model.swizzled(2 * offset(layout, ((mn, k), 0, at, slot)))
                    key = k_slice * KEY_STEP + k
                    row, column = (key, mn) if mn_major else (mn, key)
                    brought = model.tma_address(
                        slot * slot_bytes, row, column, depth if mn_major else rows
                    )
                    if not read == laid == brought:
                        return f"{name}[{slot}], slice {k_slice}, ({mn}, {k}): {read}, {laid}, {brought}"
    return None


@pytest.mark.parametrize("name", CONFIGS)
def test_what_tma_brings_is_what_mmas_read(name):
    config, found = CONFIGS[name], traced(name)
    for operand in "qkv":
        assert found[operand, "swizzle"] == "S<3,4,3>"
        assert misread(config, found, operand) is None


def test_wrong_descriptors_are_seen():
    config, found = CONFIGS["128/128"], traced("128/128")
    assert misread(config, found, "k", stride=2048)
    assert misread(config, found, "v", leading=1024)
    assert misread(config, found, "v", leading=1024, stride=config.tile_n * 128)
    pair = CONFIGS["256/256, pair"]
    assert misread(pair, traced("256/256, pair"), "v", leading=16)
    narrow = "128/128, pair"  # half of V is one group of columns: its distance is not used
    assert misread(CONFIGS[narrow], traced(narrow), "v", leading=16) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_a_slot_holds_what_its_barrier_is_told(name):
    c = CONFIGS[name]
    for operand, nbytes in (("q", c.q_bytes), ("k", c.k_bytes), ("v", c.v_bytes)):
        rows, depth, *_ = operand_of(c, operand)
        assert rows * depth * 2 == nbytes
        boxes = -(-(rows if operand == "v" else depth) // COLUMN_STEP)
        assert boxes * COLUMN_STEP * 2 * (depth if operand == "v" else rows) == nbytes


@pytest.mark.parametrize("name", CONFIGS)
def test_both_halves_of_a_pair_are_all_of_a_block(name):
    """K by keys and V by columns: each CTA brings what the MMAs read from its shared memory."""
    c = CONFIGS[name]
    for columns in (c.tile_n, c.tile_dv):
        halves = [model.share_of_b(columns, c.ctas, rank) for rank in range(c.ctas)]
        assert [x for half in halves for x in half] == list(range(columns))
        # A load's coordinate is in units of such a part: block * ctas + rank of K, rank of V.
        for rank, half in enumerate(halves):
            assert half.start == rank * (columns // c.ctas)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_accumulators_are_rows_of_q(name):
    """Row r of an MMA is lane r of its CTA, and that CTA has loaded it."""
    c, found = CONFIGS[name], traced(name)
    for tile, columns in (("s", c.tile_n), ("o in tmem", c.tile_dv)):
        for row in range(MMA_ROWS):
            for column in range(columns):
                at = offset(found[tile], ((row, column), 0, 0))
                _, lane, there = model.accumulator(row, column, c.ctas)
                assert at == lane << 16 | there
    for q_tile in range(c.q_tiles):  # parts of the rows of a tile, as loads and masks number them
        for row in range(MMA_ROWS * c.ctas):
            rank, lane, _ = model.accumulator(row, 0, c.ctas)
            assert c.part(q_tile, rank) * MMA_ROWS + lane == q_tile * MMA_ROWS * c.ctas + row


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("kind", "count"), [("load", CHUNK), ("store", CHUNK // 2)])
def test_threads_reach_their_own_lane(name, kind, count):
    found = traced(name)
    for tile in ("s", "o in tmem"):
        tiler, window = found[tile, kind, "tiler"], found[tile, kind, "window"]
        for thread in range(MMA_ROWS):
            for register in range(count):
                element = offset(found[tile, kind], (thread, register))
                row, column = element % MMA_ROWS, element // MMA_ROWS
                at = offset(window, (offset(tiler[0], row), offset(tiler[1], column)))
                lane, there = model.register_32x32b(thread, register)
                assert at == lane << 16 | there


@pytest.mark.parametrize("name", CONFIGS)
def test_mmas_read_the_p_that_threads_store(name):
    """Both S, both parts of P; and no column of P is one of another tile's."""
    c, fragment = CONFIGS[name], traced(name)["p"]
    tmem = c.graph.tmem
    for buffer in (0, 1):
        stored = {}
        for first in range(0, c.tile_n, CHUNK):
            column = tmem.s(buffer) + (tmem.p(0) - tmem.s(0)) + first // 2
            for register in range(CHUNK // 2):
                for half in (0, 1):
                    stored[first + 2 * register + half] = (column + register, half)
        for key in range(c.tile_n):
            at = offset(fragment, (0, 0, slice_of(fragment, key // KEY_STEP), 0))
            _, column, half = model.operand_in_tensor_memory(0, key % KEY_STEP)
            assert stored[key] == (tmem.p(buffer) + at // 2 + column, half)
    taken = [
        column
        for part, (first, columns) in tmem.ranges().items()
        for column in range(first, first + columns)
        if part[0] != "p"
    ]
    assert len(taken) == len(set(taken)) and max(taken) < TMEM_COLUMNS


@pytest.mark.parametrize("name", CONFIGS)
def test_tma_stores_what_threads_wrote_of_o(name):
    c, found = CONFIGS[name], traced(name)
    assert found["o", "swizzle"] == "S<3,4,3>"
    for slot in range(c.o_slots):
        for row in range(MMA_ROWS):
            for column in range(c.o_columns):
                written = model.swizzled(2 * offset(found["o"], (row, column, slot)))
                assert written == model.tma_address(slot * c.o_bytes, row, column, MMA_ROWS)
    columns = [c.place_of_part(i) for i in range(c.o_parts)]
    assert len(set(columns)) == c.o_parts and c.o_parts * c.o_columns == c.q_tiles * c.tile_dv


def test_descriptors_are_those_of_the_isa():
    """Fields at their places: address, leading, stride, version 1, swizzle of 128 bytes."""
    number = Descriptor(0x12340, 16_384, 1024).number
    assert number == 0x1234 | 1024 << 16 | 64 << 32 | 1 << 46 | 2 << 61


def test_bits_of_a_mask_are_those_of_the_columns_that_a_row_sees():
    """Seven to a byte: bits below the place of the first hidden column are those of the columns before it."""
    for visible in range(300):
        end = place_in_sevens(visible)
        for column in range(128):
            word, bit = divmod(column, SEVENS)
            bits = (1 << min(max(end - 32 * word, 0), 32)) - 1  # as numerics.low_bits
            assert place_in_sevens(bit) % 8 < 7 and place_in_sevens(bit) < 32
            assert bits >> place_in_sevens(bit) & 1 == (column < visible)
