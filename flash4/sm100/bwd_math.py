"""Verbs of the Blackwell backward's roles of warpgroups, in CuTe: P and dS, dK and dV, and the way out of dQ.

A thread has one lane of tensor memory: of S^T and dP^T a key, with 64 queries of a step in two parts of 32 columns.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.experimental import primitives

from flash4.common import numerics
from flash4.common.fragments import GROUP_NUMBERS
from flash4.common.geometry import choose
from flash4.common.numerics import LOG2E
from flash4.sm100.bwd_config import DQ_STAGES, FLOAT_BYTES
from flash4.sm100.bwd_graph import CHUNK, ROWS
from flash4.sm100.bwd_ops import Operand, element

PIECE = 8  # 16-bit elements that a thread stores to shared memory at a time, and scores that it works on
VECTOR = 4  # float32 that a thread loads from shared memory at a time


@dataclass(frozen=True)
class Lanes:
    """A thread's way into tensor memory."""

    pointer: object
    thread: object  # in its warpgroup

    def _window(self, column, columns):
        layout = cute.make_layout((ROWS, columns), stride=(1 << 16, 1))
        return cute.make_tensor(self.pointer + column, layout)

    def load(self, values, at, column, columns):
        """Start a load of columns into registers from number ``at`` on."""
        window = self._window(column, columns)
        op = tcgen05.Ld32x32bOp(tcgen05.Repetition(columns))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), window)
        target = cute.make_tensor(values.iterator + at, cute.make_layout(((columns, 1), 1, 1)))
        cute.copy(copy, copy.get_slice(self.thread).partition_S(window), target)

    def store(self, words, column, columns):
        """Store registers, and wait until they are there."""
        window = self._window(column, columns)
        op = tcgen05.St32x32bOp(tcgen05.Repetition(columns))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), window)
        source = cute.make_tensor(words.iterator, cute.make_layout(((columns, 1), 1, 1)))
        cute.copy(copy, source, copy.get_slice(self.thread).partition_D(window))
        cute.arch.fence_view_async_tmem_store()


@dataclass(frozen=True)
class Place:
    """Where a step lies; None of what its verbs do not ask."""

    entry: object  # batch entry of statistics and sums
    head: object  # query head
    block: object  # of queries of the sequence
    slot: object  # of the entry
    slope_log2: object = None  # of ALiBi, of the head


def some(values, at, count):
    """Registers from number ``at`` on."""
    return cute.make_tensor(values.iterator + at, cute.make_layout(count))


@dataclass(frozen=True)
class RunTime:
    """What crosses the launch besides operands and grid; None where the config has no such feature."""

    lse: cute.Tensor  # (B, H, padded S), float32
    delta: cute.Tensor  # (B, H, padded S), float32
    dq: cute.Tensor  # (B, H, blocks, tile_m tile_d), float32
    scale: Float32  # factor of a score
    cap_log2: object  # the cap in log2 units, Float32
    cap_scale: object  # factor of a score within the cap, Float32
    left: object  # sides of the window, Int32
    right: object
    slopes: object  # (B, H), float32
    turns: object  # (B, H, blocks, 2), int32
    queries: object  # kv_sequences.Side; None where all sequences are as long as their tensors, as the next
    keys: object
    entry_rows: (
        dict  # rows from one batch entry to the next by name, of what is ragged but not packed
    )


@dataclass(frozen=True)
class ComputeOps:
    """Verbs of the ``compute`` role."""

    config: cutlass.Constexpr
    tmem: cutlass.Constexpr
    tiles: object
    run_time: RunTime
    lanes: Lanes
    sStat: cute.Tensor  # (4, 32, 2, slots) float32: four queries, which four, -LSE or -D
    sPanels: cute.Tensor  # (128 keys, 64 queries, panels), 16 bit
    sDK: cute.Tensor  # (128, part_d, 1)
    sDV: cute.Tensor  # (128, part_dv, 1)
    dk_out: Operand  # (S, D, heads_kv, B); of packed keys a ragged view instead of B
    dv_out: Operand
    rank: object  # of the CTA
    warp: object  # in the role
    warpgroup: object  # in the role
    split: object = 0  # which part of the columns of dK and dV the CTA has

    def phases(self, tile):
        """See ``KvSteps.phases``."""
        return self.tiles.phases(tile)

    def place(self, tile, i, phase):
        """Where step ``i`` lies, for masks and biases; before the waits, which hide what it takes."""
        if not (phase.masked or self.config.alibi):
            return None
        block, head = self.tiles.place(tile, i)
        slope = None
        if self.config.alibi:
            slope = self.run_time.slopes[self.tiles.where(tile).batch, head] * LOG2E
        return Place(None, head, block, None, slope)

    def _vector(self, which, part, column, slot):
        """A statistic of four queries, the same for all threads of a warp."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        at = self.tmem.loaded(self.warpgroup, part) // VECTOR + column // VECTOR
        cute.autovec_copy(self.sStat[None, at, which, slot.index], values)
        return values

    def load_s(self):
        """S^T of this thread in registers."""
        scores = cute.make_rmem_tensor(self.config.query_parts * CHUNK, Float32)
        for part in range(self.config.query_parts):
            column = self.tmem.s() + self.tmem.loaded(self.warpgroup, part)
            self.lanes.load(scores, part * CHUNK, column, CHUNK)
        cute.arch.fence_view_async_tmem_load()
        return scores

    def softmax(self, tile, place, scores, slot, phase):
        """P^T = exp2(scale_log2 S^T - LSE); hidden pairs give 0.

        Returns:
            (P^T, times the slope of a cap, over the scores; P^T in 16 bit).
        """
        c = self.config
        probs = cute.make_rmem_tensor(c.query_parts * CHUNK, element(c))
        for part in range(self.config.query_parts):
            seen, bias = self._seen(tile, place, part, phase), self._bias(tile, place, part)
            for column in range(0, CHUNK, PIECE):
                at = part * CHUNK + column
                slopes = self._exponents(scores, at, bias, column)
                for j in range(0, PIECE, VECTOR):
                    self._finish_exponents(scores, at + j, (part, column + j), slot, seen)
                piece = some(scores, at, PIECE)
                some(probs, at, PIECE).store(piece.load().to(element(c)))
                for j, slope in enumerate(slopes):
                    scores[at + j] = scores[at + j] * slope
        return scores, probs

    def _exponents(self, scores, at, bias, column):
        """Scaled or capped scores of a piece in log2 units, with their bias, where it is more than a factor; returns slopes of a cap."""
        c, slopes = self.config, []
        if c.softcap or c.alibi:
            for j in range(PIECE):
                if c.softcap:
                    capped, slope = numerics.tanh_and_slope(
                        scores[at + j] * self.run_time.cap_scale
                    )
                    slopes.append(slope)
                    score = capped * self.run_time.cap_log2
                else:
                    score = scores[at + j] * self._scale_log2
                if c.alibi:
                    slope_log2, distance = bias
                    score = score - slope_log2 * cute.math.absf(distance + Float32(column + j))
                scores[at + j] = score
        return slopes

    @property
    def _scale_log2(self):
        return self.run_time.scale * LOG2E

    def _finish_exponents(self, scores, at, place, slot, seen):
        """P of four queries."""
        c, (part, column) = self.config, place
        lse = self._vector(0, part, column, slot)
        factor = Float32(1.0) if c.softcap or c.alibi else self._scale_log2
        for j in range(0, VECTOR, 2):
            pair = (scores[at + j], scores[at + j + 1])
            pair = cute.arch.fma_packed_f32x2(pair, (factor, factor), (lse[j], lse[j + 1]))
            for n, x in enumerate(pair):
                if seen is not None:
                    kept = (seen & (1 << (column + j + n))) != 0
                    x = cutlass.select_(kept, x, -Float32.inf)
                scores[at + j + n] = cute.math.exp2(x, fastmath=True)

    def _first_query(self, place, part):
        return place.block * self.config.tile_m + self.tmem.loaded(self.warpgroup, part)

    def _key(self, tile):
        return tile.n_block * self.config.tile_n + self.rank * ROWS + self.lanes.thread

    def _seen(self, tile, place, part, phase):
        """A bit for each query of a part that sees this thread's key; None where all do."""
        if not phase.masked:
            return None
        blocks, where = self.tiles.blocks, (self._key(tile), *self.tiles.lengths(tile))
        first = self._first_query(place, part)
        seen = ~numerics.low_bits(blocks.query_begin(*where) - first)
        if self.config.left:
            seen = seen & numerics.low_bits(blocks.query_end(*where) - first)
        return seen

    def _bias(self, tile, place, part):
        """(slope of the head in log2 units, distance from this thread's key to a part's first query), or None."""
        if not self.config.alibi:
            return None
        seqlen_q, seqlen_k = self.tiles.lengths(tile)
        distance = self._first_query(place, part) + seqlen_k - seqlen_q - self._key(tile)
        return place.slope_log2, Float32(distance)

    def store_p(self, probs):
        """P^T over S^T that this warpgroup has read."""
        self._store_packed(probs, self.tmem.s())

    def _store_packed(self, values, column):
        column = column + self.tmem.packed(
            self.warpgroup, 0
        )  # the second part lies behind the first
        words = self.config.query_parts * CHUNK // 2
        self.lanes.store(cute.recast_tensor(values, Float32), column, words)

    def grad(self, weights, slot):
        """dS^T = P^T (dP^T - D), in 16 bit."""
        c = self.config
        grads = cute.make_rmem_tensor(c.query_parts * CHUNK, element(c))
        for part in range(self.config.query_parts):
            dp = cute.make_rmem_tensor(CHUNK, Float32)
            column = self.tmem.dp() + self.tmem.loaded(self.warpgroup, part)
            self.lanes.load(dp, 0, column, CHUNK)
            cute.arch.fence_view_async_tmem_load()
            for first in range(0, CHUNK, VECTOR):
                delta = self._vector(1, part, first, slot)
                for j in range(0, VECTOR, 2):
                    at, n = part * CHUNK + first + j, first + j
                    pair = (dp[n], dp[n + 1])
                    pair = cute.arch.add_packed_f32x2(pair, (delta[j], delta[j + 1]))
                    pair = cute.arch.mul_packed_f32x2((weights[at], weights[at + 1]), pair)
                    weights[at], weights[at + 1] = pair
            mine = some(weights, part * CHUNK, CHUNK)
            some(grads, part * CHUNK, CHUNK).store(mine.load().to(element(c)))
        return grads

    def store_dst(self, grads):
        """In a pair dS^T over dP^T that this warpgroup has read."""
        if self.config.ctas > 1:
            self._store_packed(grads, self.tmem.dp())

    def store_ds(self, grads):
        """dS to shared memory, by panels of 64 queries; in a pair the peer's into the one that is sent."""
        # Opaque: ptxas would keep the swizzled addresses of all pieces of the row in registers around the loop.
        thread = numerics.opaque(self.lanes.thread)
        for part in range(self.config.query_parts):
            panel = part
            if self.config.ctas > 1:  # of the leader 0 and 2, of the peer 2 and 1
                panel = 2 * self.rank if part == 0 else 2 - self.rank
            row = self.sPanels[thread, None, panel]
            for column in range(0, CHUNK, PIECE):
                target = cute.local_tile(
                    row, (PIECE,), (self.warpgroup * (CHUNK // PIECE) + column // PIECE,)
                )
                cute.autovec_copy(some(grads, part * CHUNK + column, PIECE), target)
        cute.arch.fence_view_async_shared()

    def _stage(self, column, sX, width, factor):
        """Half of the columns of dV or dK: tensor memory -> shared memory in 16 bit, as TMA stores it."""
        for first in range(0, width // 2, CHUNK):
            values = cute.make_rmem_tensor(CHUNK, Float32)
            self.lanes.load(values, 0, column + width // 2 * self.warpgroup + first, CHUNK)
            cute.arch.fence_view_async_tmem_load()
            if factor is not None:
                for j in range(0, CHUNK, 2):
                    pair = (values[j], values[j + 1])
                    values[j], values[j + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))
            rounded = cute.make_rmem_tensor(CHUNK, element(self.config))
            rounded.store(values.load().to(element(self.config)))
            at = self.warpgroup * (width // 2 // CHUNK) + first // CHUNK
            row = cute.local_tile(sX[None, None, 0], (1, CHUNK), (self.lanes.thread, at))
            for j in range(0, CHUNK, PIECE):
                piece = cute.make_tensor(rounded.iterator + j, cute.make_layout((1, PIECE)))
                cute.autovec_copy(piece, cute.local_tile(row, (1, PIECE), (0, j // PIECE)))
        cute.arch.fence_view_async_shared()

    def stage_dv(self):
        """dV to shared memory, over V."""
        self._stage(self.tmem.dv(), self.sDV, self.config.part_dv, None)

    def stage_dk(self):
        """dK, scaled, over K."""
        self._stage(self.tmem.dk(), self.sDK, self.config.part_d, self.run_time.scale)

    def send_dv(self, tile):
        """Start the store of dV; rows past the sequence are clipped."""
        self._send(self.dv_out, self.sDV, tile)

    def send_dk(self, tile):
        """Start the store of dK."""
        self._send(self.dk_out, self.sDK, tile)

    @cute.jit
    def _send(self, operand, sX, tile):
        if self.warp == 0:
            where = self.tiles.where(tile)
            if cutlass.const_expr(self.config.cu_k):  # what comes after the sequence is not written
                end, rows = where.row_k + where.stored_k, cute.size(operand.tensor, mode=[0])
                mX = operand.tensor[None, None, tile.head_kv, end]
                mX = cute.domain_offset((rows - where.stored_k, 0), mX)
            else:
                mX = operand.tensor[None, None, tile.head_kv, where.entry_k]
            block = tile.n_block * self.config.ctas + self.rank
            gX = cute.local_tile(mX, (ROWS, cute.size(sX, mode=[1])), (block, self.split))
            tXsX, tXgX = cpasync.tma_partition(
                operand.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(sX, 0, 2),
                cute.group_modes(gX, 0, 2),
            )
            cute.copy(operand.atom, tXsX[None, 0], tXgX)
            cute.arch.cp_async_bulk_commit_group()

    def wait_sent(self):
        """Wait until the stores have read their shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def drain(self):
        """Wait until all stores are done."""
        cute.arch.cp_async_bulk_wait_group(0)


@dataclass(frozen=True)
class ReduceOps:
    """Verbs of the ``reduce`` role."""

    config: cutlass.Constexpr
    tmem: cutlass.Constexpr
    tiles: object
    run_time: RunTime
    lanes: Lanes
    sDQ: cute.Tensor  # (4, 128 lanes, dq_columns / 4, stages) float32
    rank: object  # of the CTA, or which part of the columns it has
    warp: object  # in the role

    @property
    def parts(self):
        """Parts in which dQ leaves."""
        return tuple(range(self.config.dq_steps))

    def load_dq(self):
        """dQ of this thread's lane in registers."""
        columns = self.tmem.dq_columns
        sums = cute.make_rmem_tensor(columns, Float32)
        for column in range(0, columns, CHUNK):
            self.lanes.load(sums, column, self.tmem.dq() + column, CHUNK)
        cute.arch.fence_view_async_tmem_load()
        return sums

    def stage_dq(self, sums, part):
        """A part of it to shared memory, four numbers of a lane together."""
        columns = self.config.dq_columns
        for group in range(columns // GROUP_NUMBERS):
            source = some(sums, part * columns + group * GROUP_NUMBERS, GROUP_NUMBERS)
            cute.autovec_copy(source, self.sDQ[None, self.lanes.thread, group, part % DQ_STAGES])
        cute.arch.fence_view_async_shared()

    def wait_read(self):
        """Wait until what was staged before has been read."""
        cute.arch.cp_async_bulk_wait_group(DQ_STAGES - 2, read=True)

    def place(self, tile, i):
        """Where step ``i`` lies."""
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        return Place(where.entry_q, head, block, where.slot_q + block)

    @cute.jit
    def add_dq(self, place, part: cutlass.Constexpr):
        """Start the addition of a part to the sums, by the first warp."""
        if self.warp == 0:
            floats = self.config.dq_floats
            sums = self.run_time.dq[place.entry, place.head, place.slot, None].iterator
            target = sums + (self.rank * self.config.dq_steps + part) * floats
            source = self.sDQ[None, 0, 0, part % DQ_STAGES].iterator
            with cute.arch.elect_one():
                primitives.cp_reduce_async_bulk_global_shared_cta(
                    target,
                    source,
                    floats * FLOAT_BYTES,
                    op=primitives.CpReduceOp.ADD,
                    type=primitives.CpReduceType.F32,
                )
                cute.arch.cp_async_bulk_commit_group()

    def _turn(self, place):
        turns = self.run_time.turns[place.entry, place.head, place.slot, None]
        return turns.iterator + self.rank

    @cute.jit
    def wait_turn(self, tile, place):
        """Wait until all tiles whose turn comes first have added theirs."""
        if cutlass.const_expr(self.config.ordered):
            if self.warp == 0:
                turn, before = self._turn(place), self.tiles.rank_of(tile, place.block)
                count = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
                while count < before:
                    count = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
                cute.arch.fence_proxy("async.global")  # the copy engine comes after this thread

    @cute.jit
    def pass_turn(self, tile, place):
        """Wait until the addition is done, and let the next tile go."""
        if cutlass.const_expr(self.config.ordered):
            if self.warp == 0:
                turn, rank = self._turn(place), self.tiles.rank_of(tile, place.block)
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async.global")
                counts = choose(rank >= 0, Int32(1), Int32(0))  # others have no turn
                with cute.arch.elect_one():
                    cute.arch.red(turn, counts, op="add", dtype="s32", sem="release", scope="gpu")

    def drain(self):
        """Wait until all additions are done."""
        cute.arch.cp_async_bulk_wait_group(0)
