"""Layouts, descriptors and maps of the Blackwell backward for head dims above 128, as in ``test_layouts_bwd100``.

Here operands of dQ^T, dK and dV are some of the columns of what TMA brings, and dQ^T has 128 or 64 rows.
"""

from dataclasses import replace
from functools import cache

import cutlass.cute as cute
import pytest
from cutlass import Float32

from flash4.common.fragments import GROUP_NUMBERS, dq_place
from flash4.passes.bwd_config import passes_of
from flash4.sm100 import bwd_ops
from flash4.sm100.bwd_config import PANEL
from flash4.sm100.bwd_graph import ROWS, SLICE
from flash4.sm100.bwd_wide_config import PIECE_NUMBERS, WideBackwardConfig
from flash4.sm100.bwd_wide_ops import PIECES, make_mma_dp_kept
from tests.host import umma_model as model
from tests.host.test_layouts_bwd100 import Probe, check_stores
from tests.host.test_layouts_fwd100 import offset, slice_of
from tests.host.umma_model import Descriptor

CONFIGS = {
    "192/128": WideBackwardConfig(True, 192, 128, True),
    "128/256": WideBackwardConfig(False, 128, 256, True),
    "256/64": WideBackwardConfig(True, 256, 64, True),
    "256/128": WideBackwardConfig(True, 256, 128, True, splits=2),
    "256/256": WideBackwardConfig(True, 256, 256, True, splits=2),
}


class WideProbe(Probe):
    """The same of dQ^T."""

    def _mmas(self):
        parts = enumerate(self.config.dq_accumulators)
        return [(i, bwd_ops.make_mma_dq_turned(self.config, rows), rows) for i, (_, rows) in parts]

    def note(self):
        """The same, and dP where V is in tensor memory."""
        super().note()
        if self.config.keeps_v:
            mma = make_mma_dp_kept(self.config)
            tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
            layout = bwd_ops.smem_layouts(self.config)["p"].outer
            shaped = mma.make_fragment_A(cute.make_tensor(tmem, layout))
            self._keep("slice of V", shaped[None, None, 0, 0].layout)
            shape = mma.partition_shape_C((ROWS, PANEL))
            self._keep(("dp", "accumulator"), mma.make_fragment_C(shape).layout)

    def fragments_of_dq(self):
        """Name of an operand of dQ^T -> what makes its fragment."""
        found = {f"kt{i}": mma.make_fragment_A for i, mma, _ in self._mmas()}
        return found | {"ds": self._mmas()[0][1].make_fragment_B}

    def products_of_dq(self):
        """Name of a product -> its MMA and shape."""
        return {f"dq{i}": (mma, (rows, PANEL)) for i, mma, rows in self._mmas()}


@cache
def traced(name: str) -> dict:
    """Layouts of a config."""
    probe = WideProbe(CONFIGS[name])
    cute.compile(probe, options="--gpu-arch sm_100a")
    return probe.found


def operands_of(c: WideBackwardConfig) -> dict:
    """Name -> (rows or columns of M or N, depth, distance of groups of MN, whether MN is contiguous)."""

    def transposed(width, depth):
        return width, depth, depth * 128 if width > 64 else 16, True

    found = {
        "k": (ROWS, c.tile_d, 16, False),
        "v": (ROWS, c.part_dv, 16, False),
        "q": (PANEL, c.tile_d, 16, False),
        "do": (PANEL, c.tile_dv, 16, False),
        "qt": transposed(c.part_d, PANEL),
        "dot": transposed(c.part_dv, PANEL),
        "ds": transposed(PANEL, ROWS),
        "dst": (ROWS, PANEL, 16, False),
    }
    rows_of_products = enumerate(rows for _, rows in c.dq_accumulators)
    return found | {f"kt{i}": transposed(rows, ROWS) for i, rows in rows_of_products}


def first_column(c: WideBackwardConfig, name: str, split: int) -> int:
    """Of what a part of an operand is, in the tensor that TMA brings."""
    if name.startswith("kt"):
        return split * c.part_d + ROWS * int(name[2:])
    return split * {"qt": c.part_d, "dot": c.part_dv}.get(name, 0)


def brought(c, name: str, mn: int, k: int, split: int) -> int:
    """Byte of its buffer at which TMA, or for dS a thread, puts an element of an operand."""
    _, depth, _, mn_major = operands_of(c)[name]
    if name in ("ds", "dst"):
        query, key = (mn, k) if name == "ds" else (k, mn)
        return model.swizzled(key * 128 + query * 2)
    row, column = (k, mn) if mn_major else (mn, k)
    rows = depth if mn_major else operands_of(c)[name][0]
    return model.tma_address(0, row, first_column(c, name, split) + column, rows)


def misread(c, found, name, split=0, **wrong) -> str | None:
    """The first element for which descriptor, layout and whoever writes it do not agree."""
    rows, depth, leading, mn_major = operands_of(c)[name]
    fragment, layout, start = found[name, "fragment"], found[name], 0
    if name.startswith(("kt", "qt", "dot")):
        _, start = c.start_of(name, split)
    for k_slice in range(depth // SLICE):
        at = slice_of(layout, k_slice)
        begin = start + 16 * offset(fragment, (0, 0, slice_of(fragment, k_slice), 0))
        descriptor = replace(Descriptor(begin, leading, 1024), **wrong)
        for mn in range(rows):
            for k in range(SLICE):
                read = model.operand_address(descriptor, mn, k, mn_major)
                laid = start + model.swizzled(2 * offset(layout, ((mn, k), 0, at, 0)))
                put = brought(c, name, mn, k_slice * SLICE + k, split)
                if not read == laid == put:
                    return f"{name}, slice {k_slice}, ({mn}, {k}): {read}, {laid}, {put}"
    return None


OPERANDS = [
    (name, operand, split)
    for name, c in CONFIGS.items()
    for operand in operands_of(c)
    for split in range(c.splits if operand.startswith(("kt", "qt", "dot")) else 1)
]


@pytest.mark.parametrize(("name", "operand", "split"), OPERANDS)
def test_mmas_read_what_was_written(name, operand, split):
    found = traced(name)
    assert found[operand, "swizzle"] == "S<3,4,3>"
    assert misread(CONFIGS[name], found, operand, split) is None


@pytest.mark.parametrize(
    ("operand", "wrong"),
    [("k", {"stride": 2048}), ("kt0", {"leading": 8192}), ("kt1", {"start": 0}),
     ("ds", {"stride": 512}), ("qt", {"leading": 1024})],
)  # fmt: skip
def test_wrong_descriptors_are_seen(operand, wrong):
    assert misread(CONFIGS["192/128"], traced("192/128"), operand, **wrong)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_slots_are_as_far_apart_as_slots(name):
    """Of Q, whose columns dK reads: its own of each slot."""
    c, found = CONFIGS[name], traced(name)
    assert found["qt"][1][3] * 2 == c.q_bytes


@pytest.mark.parametrize("name", CONFIGS)
def test_threads_load_what_mmas_write(name):
    c, found = CONFIGS[name], traced(name)
    for acc, columns in (("s", PANEL), ("dv", c.part_dv), ("dk", c.part_d)):
        for row in range(ROWS):
            for column in range(columns):
                at = offset(found[acc, "accumulator"], ((row, column), 0, 0))
                assert at == row << 16 | column
    for i, (_, rows) in enumerate(c.dq_accumulators):
        for row in range(rows):
            for column in range(PANEL):
                at = offset(found[f"dq{i}", "accumulator"], ((row, column), 0, 0))
                lane, there = (row, column)
                if rows < ROWS:
                    lane, there = model.accumulator_of_64(row, column)
                assert at == lane << 16 | there


KEPT = [name for name, c in CONFIGS.items() if c.keeps_v]


@pytest.mark.parametrize("name", KEPT)
def test_v_in_tensor_memory_is_as_mmas_read_it(name):
    """Every column of V once: where a warpgroup stores it, of which half; and where the slice that it belongs to is read."""
    c, found = CONFIGS[name], traced(name)
    width, seen = c.part_dv // 2, set()
    for half in (0, 1):
        for warpgroup in (0, 1):
            for i in range(width):
                column = half * c.part_dv + warpgroup * width + i
                stored = c.tmem.v() + (2 * half + warpgroup) * (width // 2) + i // 2
                slice_at, within = c.tmem.v() + SLICE // 2 * (column // SLICE), column % SLICE
                _, there, in_word = model.operand_in_tensor_memory(0, within)
                assert (stored, i % 2) == (slice_at + there, in_word)
                assert offset(found["slice of V"], ((0, within), 0)) == 2 * there + in_word
                seen.add(column)
    assert seen == set(range(c.tile_dv))
    for row in range(ROWS):
        for column in range(PANEL):
            at = offset(found["dp", "accumulator"], ((row, column), 0, 0))
            assert at == row << 16 | column


def staged(c, part: int, lane: int, group: int) -> tuple[int, int] | None:
    """(register, place in the piece) of the first of four numbers that ``reduce`` stages together; see ``stage_dq``."""
    which, within = divmod(part, PIECES)
    rows = c.dq_accumulators[which][1]
    groups = PIECE_NUMBERS // rows // GROUP_NUMBERS
    register = which * PANEL + (within * groups + group) * GROUP_NUMBERS
    if group >= groups or rows < ROWS and lane % 32 >= 16:
        return None
    row = lane if rows == ROWS else lane // 32 * 16 + lane % 32
    return register, (group * rows + row) * GROUP_NUMBERS


@pytest.mark.parametrize("name", CONFIGS)
def test_sums_of_dq_are_read_where_they_were_put(name):
    """A bijection from lanes and columns of every CTA to the block, which the kernel after it inverts."""
    c = CONFIGS[name]
    _, finish = passes_of(c, False)
    seen, half = set(), PANEL * c.tile_d // 2
    for split in range(c.splits):
        for part in range(c.dq_steps):
            for lane in range(ROWS):
                for group in range(8):
                    if not (found := staged(c, part, lane, group)):
                        continue
                    register, at = found
                    first, rows = c.dq_accumulators[register // PANEL]
                    row = lane if rows == ROWS else lane // 32 * 16 + lane % 32
                    flat = (split * c.dq_steps + part) * PIECE_NUMBERS + at
                    for number in range(GROUP_NUMBERS):
                        which, rest = divmod(flat + number, half)
                        its_group, rest = divmod(rest, ROWS * GROUP_NUMBERS)
                        thread, its_number = divmod(rest, GROUP_NUMBERS)
                        place = dq_place(finish, which, thread, its_group, its_number)
                        query = register % PANEL + number
                        assert place == (query, split * c.part_d + first + row)
                        seen.add(place)
    assert len(seen) == PANEL * c.tile_d


@pytest.mark.parametrize("name", CONFIGS)
def test_tma_stores_what_threads_wrote_of_dk_and_dv(name):
    c = CONFIGS[name]
    check_stores(traced(name), {"dk": c.part_d, "dv": c.part_dv})


@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_hold_what_barriers_are_told(name):
    c = CONFIGS[name]
    sizes = {b.name: b.nbytes for b in c.graph.buffers}
    told = {"k": c.k_bytes, "v": c.v_bytes, "q": c.q_bytes, "do": c.do_bytes}
    for operand, nbytes in told.items():
        rows, depth, *_ = operands_of(c)[operand]
        assert rows * depth * 2 == nbytes
        assert sizes[operand] == nbytes * (c.q_stages if operand == "q" else 1)
    assert sizes["ds"] == c.panel_bytes
