"""Before a backward: D = rowsum(dO O) - dLSE, the LSE in log2 units, and zeros for the sums of dQ to start from."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.memory import SmemAllocator

from flash4.common.geometry import QueryBlocks
from flash4.common.graph import WARP
from flash4.common.kv_one_tile import TILE_WORDS, find_into
from flash4.common.kv_sequences import SequenceSchedule, Side
from flash4.common.kv_tiles import KvGrid
from flash4.common.numerics import LOG2E
from flash4.passes.bwd_config import THREADS, PrepareConfig
from flash4.passes.bwd_rows import fake_lengths, fake_rows, keys_side, queries_side, rows_of

VECTOR = 8  # 16-bit elements of one load
FLOATS = 4  # float32 of one store
TURNS = 2  # of each block: the parts of dQ that the MMA warpgroups add


class PrepareBackward:
    """One CTA for each block of queries of one head."""

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.dtype = BFloat16 if config.bf16 else Float16
        self.lanes = next(
            n for n in (8, 16, 32) if n * VECTOR >= config.tile_dv
        )  # threads of one row
        self.rows = THREADS // self.lanes  # at a time

    def fake_arguments(self):
        """Arguments of ``__call__`` with symbolic sizes and strides, for compiling without data."""
        c, fake = self.config, cute.runtime.make_fake_tensor
        batch, heads, seqlen, padded, blocks = (cute.sym_int() for _ in range(5))
        head_dim = cute.sym_int(divisibility=VECTOR)

        def sym(divisibility=1):
            return cute.sym_int64(divisibility=divisibility)

        def rows():
            strides = (sym(8), sym(8), sym(8), 1)
            shape = (batch, seqlen, heads, head_dim)
            return fake(self.dtype, shape, stride=strides, assumed_align=16)

        def statistic(length, *last):
            return fake(
                Float32, (batch, heads, length), stride=(sym(), sym(), *last), assumed_align=4
            )

        sums = fake(
            Float32,
            (batch, heads, blocks, c.tile_m * c.tile_d),
            stride=(sym(4), sym(4), sym(4), 1),
            assumed_align=16,
        )
        tensors = (
            rows(), rows(), statistic(seqlen, 1), statistic(padded, 1), statistic(padded, 1), sums,
            *fake_lengths(c),
        )  # fmt: skip
        if c.turns:
            tensors += (
                fake(
                    Int32,
                    (batch, heads, blocks, TURNS),
                    stride=(sym(), sym(), sym(), 1),
                    assumed_align=4,
                ),
            )
        if c.handed_out:
            tensors += (fake(Int32, (1,), stride=(1,), assumed_align=4),)
        if c.dlse:
            tensors += (statistic(seqlen, sym()),)
        if c.finds:
            found = fake(Int32, (cute.sym_int(), TILE_WORDS), stride=(sym(4), 1), assumed_align=16)
            numbers = (Int32(1),) * (1 + c.left + c.right)
            tensors += (found, *numbers, *fake_rows(self.dtype, c))
        return (tensors, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        tensors,  # out, dout (B, S, H, Dv), lse (B, H, S); lse2, delta (B, H, padded S), dq (B, H, blocks, ..); cu_q, used_q, turns, next_tile, dlse; see ``_schedule``
        stream,
    ):
        """Launch."""
        sums, lengths = tensors[5], self.config.cu_q + self.config.used_q
        blocks = (sums.shape[2], sums.shape[1])
        side = queries_side(self.config, tensors[0], tensors[6 : 6 + lengths])
        keys, facts = self._facts(tensors)
        tensors = tensors[:6] + tensors[6 + lengths :]
        self.kernel(tensors, blocks, side, keys, facts).launch(
            grid=(sums.shape[2] * sums.shape[1] * sums.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    def _facts(self, tensors):
        """Keys of the next kernel's tiles, and (place for these, KV heads, query heads of each, tiles of a section, sides of
        the window), which the last tensors say; None if tiles are not looked for.
        """
        c, out = self.config, tensors[0]
        if not c.finds:
            return None, None
        numbers, lengths = 1 + c.left + c.right, c.cu_k + c.used_k
        found, section, *rest = tensors[len(tensors) - lengths - 2 - numbers :]
        sides, (k, *lengths) = rest[: numbers - 1], rest[numbers - 1 :]
        heads = (k.shape[2], out.shape[2] // k.shape[2])
        return keys_side(c, k, lengths), (found, *heads, section, *sides)

    @cute.kernel
    def kernel(self, tensors: tuple, blocks: tuple, side: Side, keys, facts):
        """All loads first: they are what takes the time."""
        c = self.config
        out, dout, lse, lse2, delta, sums, *optional = tensors
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(c.chained):
            cute.arch.griddepcontrol_launch_dependents()
        block, head, batch = place_of(index, blocks)
        mine = rows_of(side, thread, (block, batch), out, c.tile_m)
        passes = cute.ceil_div(c.tile_m, self.rows)
        lane, first = thread % self.lanes, thread // self.lanes
        sD = SmemAllocator().allocate_tensor(Float32, cute.make_layout(passes * self.rows))
        outs = cute.make_rmem_tensor((VECTOR, passes), self.dtype)
        douts = cute.make_rmem_tensor((VECTOR, passes), self.dtype)
        # Every thread loads, so that no branch keeps loads apart: at the edges what is not asked for.
        exists = lane * VECTOR < out.shape[3]
        vector = cutlass.select_(exists, lane, 0)
        for i in cutlass.range_constexpr(passes):
            place = (mine.entry, row_in(out, mine.begin + i * self.rows + first), head, None)
            load_vector(out[place], vector, outs[None, i])
            load_vector(dout[place], vector, douts[None, i])
        stored = (mine.entry, head, row_in(out, mine.begin + thread))  # whose statistics it stores
        row_lse, row_dlse = lse[stored], Float32(0.0)
        if cutlass.const_expr(c.dlse):
            row_dlse = optional[c.turns + c.handed_out][stored]
        if cutlass.const_expr(c.finds):
            self._find(facts[0], self._schedule(side, keys, *facts[1:]))
        if cutlass.const_expr(c.zeroes):
            zeros = cute.make_rmem_tensor(FLOATS, Float32)
            zeros.fill(0.0)
            target = sums[batch, head, block, None].iterator + thread * FLOATS
            for i in cutlass.range_constexpr(c.tile_m * c.tile_d // (FLOATS * THREADS)):
                at = (target + i * FLOATS * THREADS).align(16)
                cute.autovec_copy(zeros, cute.make_tensor(at, cute.make_layout(FLOATS)))
        if cutlass.const_expr(c.turns):
            if thread < TURNS:
                optional[0][batch, head, block, thread] = 0
        if cutlass.const_expr(c.handed_out):
            next_tile = optional[int(c.turns)]
            if (index == 0) & (thread == 0):
                next_tile[0] = 0
        for i in cutlass.range_constexpr(passes):
            products = outs[None, i].load().to(Float32) * douts[None, i].load().to(Float32)
            total = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = Float32(cutlass.select_(exists, total, Float32(0.0)))
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)
            if lane == 0:
                sD[i * self.rows + first] = total
        cute.arch.sync_threads()
        # What is +inf makes P = 0: rows behind the last, and rows that see no key.
        seen = (thread < mine.used) & (row_lse != -Float32.inf)
        slot = block * c.tile_m + thread
        sign = -1.0 if c.negates else 1.0
        if thread < c.tile_m:
            lse2[batch, head, slot] = sign * cutlass.select_(seen, row_lse * LOG2E, Float32.inf)
            delta[batch, head, slot] = sign * cutlass.select_(
                seen, sD[thread] - row_dlse, Float32(0.0)
            )

    def _schedule(self, queries, keys, heads_kv, ratio, section, *sides):
        """Tiles of the next kernel."""
        c = self.config
        left, right = sides[0] if c.left else None, sides[-1] if c.right else None
        blocks = QueryBlocks(c.tile_m, c.tile_n, c.causal, left, right)
        grid = KvGrid(0, heads_kv, 0, ratio)
        return SequenceSchedule(blocks, grid, queries, keys, section, c.least_heads)

    @cute.jit
    def _find(self, found, schedule):
        """Look for the tiles of all numbers, each by a warp."""
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        count, _, _ = cute.arch.grid_dim()
        warps = THREADS // WARP
        number = index * warps + thread // WARP
        while number < cute.size(found, mode=[0]):
            find_into(found[number, None], schedule, thread % WARP, number)
            number = number + count * warps


def place_of(index, blocks):
    """(block, head, batch) of a CTA; ``blocks`` are the numbers of blocks and of heads.

    Heads first: those of one query are neighbours in memory.
    """
    count, heads = blocks
    rest = index // heads
    batch = rest // count
    return rest - batch * count, index - rest * heads, batch


def row_in(x, row):
    """A row, or the nearest that x (B, S, H, D) has."""
    return cutlass.max(cutlass.min(row, x.shape[1] - 1), 0)


def load_vector(row, lane, values):
    """Eight elements of a row."""
    at = (row.iterator + lane * VECTOR).align(16)
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(VECTOR)), values)
