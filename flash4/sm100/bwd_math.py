"""Verbs of the Blackwell backward's roles of warpgroups, in CuTe: P and dS, dK and dV, and the way out of dQ.

A thread has one lane of tensor memory: of S^T and dP^T a key, with 64 queries of a step in two parts of 32 columns.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.experimental import primitives

from flash4.common import mods, numerics
from flash4.common.fragments import GROUP_NUMBERS
from flash4.common.geometry import choose, imax, imin
from flash4.common.mods import SeqlenInfo
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
    """Where a step lies."""

    entry: object  # batch entry of statistics and sums
    head: object  # query head
    block: object  # of queries of the sequence
    slot: object  # of the entry


@dataclass(frozen=True)
class ScorePlace:
    """Where the scores of a step lie; None of what the config does not ask."""

    block: object  # of queries of the sequence
    head: object  # query head
    slope: object  # of ALiBi, of the head, in log2 units unless the config is natural
    batch: object  # number of the sequence
    key: object  # of this thread, or the nearest that exists
    info: object  # mods.SeqlenInfo


@dataclass(frozen=True)
class Run:
    """Queries of a step in a row, of a thread."""

    offset: object  # of the first one in the step
    first_query: object  # its number in the sequence; None if not asked
    seen: object  # a bit for each query that sees this thread's key; None if all do
    bias: object  # (slope, distance from this thread's key to the first query), or None


@dataclass(frozen=True)
class Known:
    """What is known of some scores beside P."""

    given: list  # scores as a score_mod is given them; empty without one
    slopes: list  # of the cap, empty without one
    kept: list  # whether a pair is seen; None where it surely is


@dataclass(frozen=True)
class Weights:
    """What dS of a step takes of S^T: P^T, times the slope of the cap; or with a score_mod S^T as it was multiplied."""

    values: cute.Tensor
    tile: object
    masked: bool
    place: object  # ScorePlace


def copy_of(values):
    """The same in registers of their own."""
    copied = cute.make_rmem_tensor(cute.size(values), Float32)
    copied.store(values.load())
    return copied


def chosen(values, which, run):
    """Registers of a run of so many, whose number is known at run time, in registers of their own."""
    found = copy_of(some(values, 0, run))
    for number in range(1, cute.size(values) // run):
        for j in range(run):
            found[j] = cutlass.select_(which == number, values[number * run + j], found[j])
    return found


def put(values, which, found, run):
    """Registers back in the place of their run, from its first on."""
    for at in range(cute.size(values)):
        number, j = divmod(at, run)
        if j < cute.size(found):
            values[at] = cutlass.select_(which == number, found[j], values[at])


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
    cap: object  # in log2 units unless the config is natural, Float32
    cap_scale: object  # factor of a score within the cap, Float32
    left: object  # sides of the window, Int32
    right: object
    slopes: object  # (B, H), float32
    turns: object  # (B, H, blocks, 2), int32
    aux: object  # tuple of tensors that mods read
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
        c = self.config
        if not (phase.masked or c.alibi or c.has_mods):
            return None
        (block, head), batch, slope, info, key = self.tiles.place(tile, i), None, None, None, None
        if c.alibi:
            slope = self.run_time.slopes[self.tiles.where(tile).batch, head] * self._unit
        if c.has_mods:
            where, lengths = self.tiles.where(tile), self.tiles.lengths(tile)
            info = SeqlenInfo(*lengths, Int32(where.row_q), Int32(where.row_k))
            batch, key = where.batch, imax(imin(self._key(tile), lengths[1] - 1), 0)
        return ScorePlace(block, head, slope, batch, key, info)

    def _vector(self, which, run, column, slot):
        """A statistic of four queries of a run, the same for all threads of a warp."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        at = run.offset // VECTOR + column // VECTOR
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
            (what dS takes: P^T, times the slope of a cap, over the scores, or with a score_mod S^T as it is; P^T in 16 bit).
        """
        c = self.config
        probs = cute.make_rmem_tensor(c.queries, element(c))
        weights = Weights(scores, tile, phase.masked, place)
        if c.run < c.queries:
            self._softmax_by_runs(tile, place, scores, slot, phase.masked)
            return weights, probs
        for part in range(c.query_parts):
            run = self._run(tile, place, self.tmem.loaded(self.warpgroup, part), phase.masked)
            for column in range(0, CHUNK, PIECE):
                at = part * CHUNK + column
                piece, rounded = some(scores, at, PIECE), some(probs, at, PIECE)
                self._softmax_of(piece, rounded, (place, run, column), slot)
        return weights, probs

    @cute.jit
    def _softmax_by_runs(self, tile, place, scores, slot, masked: cutlass.Constexpr):
        """A run of queries at a time, all by the same code: what a whole step would take in registers does not fit."""
        c = self.config
        for number in cutlass.range(c.queries // c.run, unroll=1):
            which = numerics.opaque(number)
            run = self._run(tile, place, self.tmem.loaded_run(self.warpgroup, which, c.run), masked)
            piece = chosen(scores, which, c.run)
            rounded = cute.make_rmem_tensor(c.run, element(c))
            self._softmax_of(piece, rounded, (place, run, 0), slot)
            at = self.tmem.s() + self.tmem.packed_run(self.warpgroup, which, c.run)
            self._store_words(rounded, at)
            self._keep(scores, which, piece)

    def _keep(self, scores, which, piece):
        """What dS takes of a run."""
        if not self.config.score_mod:
            put(scores, which, piece, self.config.run)

    def _softmax_of(self, piece, rounded, at, slot):
        """P of some queries, rounded; over their products what dS takes."""
        probs = copy_of(piece) if self.config.score_mod else piece
        known = self._probabilities(probs, at, slot)
        rounded.store(probs.load().to(element(self.config)))
        if not self.config.score_mod:
            for j, slope in enumerate(known.slopes):
                piece[j] = piece[j] * slope

    def _probabilities(self, piece, at, slot):
        """P over the products of some queries; returns what else is known of them."""
        place, run, column = at
        given, kept, slopes = [], [], self._scaled(piece, run.bias, column)
        if self.config.score_mod:
            given = [piece[j] for j in range(cute.size(piece))]
            modify = mods.function(self.config.score_mod)
            for j, score in enumerate(given):
                piece[j] = Float32(modify(score, *self._where(place, run, column + j)))
        for j in range(0, cute.size(piece), VECTOR):
            kept += self._finish_exponents(some(piece, j, VECTOR), (place, run, column + j), slot)
        return Known(given, slopes, kept)

    def _scaled(self, piece, bias, column):
        """Scale or cap scores and add their bias, where it is more than a factor; returns slopes of a cap."""
        c, slopes = self.config, []
        if c.softcap or c.alibi or c.natural:
            for j in range(cute.size(piece)):
                if c.softcap:
                    capped, slope = numerics.tanh_and_slope(piece[j] * self.run_time.cap_scale)
                    slopes.append(slope)
                    score = capped * self.run_time.cap
                else:
                    score = piece[j] * self._scale
                if c.alibi:
                    slope, distance = bias
                    score = score - slope * cute.math.absf(distance + Float32(column + j))
                piece[j] = score
        return slopes

    @property
    def _scale(self):
        """Factor of a score, in log2 units unless the config is natural."""
        return self.run_time.scale * self._unit

    @property
    def _unit(self):
        """What a score in natural units is multiplied by."""
        return 1.0 if self.config.natural else LOG2E

    def _finish_exponents(self, values, at, slot):
        """P of four queries; returns whether each is kept."""
        (place, run, column), c, found = at, self.config, []
        lse = self._vector(0, run, column, slot)
        if c.natural:
            factor = Float32(LOG2E)
        else:
            factor = Float32(1.0) if c.softcap or c.alibi else self._scale
        for j in range(0, VECTOR, 2):
            pair = (values[j], values[j + 1])
            pair = cute.arch.fma_packed_f32x2(pair, (factor, factor), (lse[j], lse[j + 1]))
            for n, x in enumerate(pair):
                kept = self._kept(place, run, column + j + n, lse[j + n])
                if kept is not None:
                    x = cutlass.select_(kept, x, -Float32.inf)
                values[j + n] = cute.math.exp2(x, fastmath=True)
                found.append(kept)
        return found

    def _kept(self, place, run, column, lse):
        """Whether this thread's key is seen by a query; None if it surely is."""
        c, kept = self.config, None
        if run.seen is not None:
            kept = (run.seen & (1 << column)) != 0
        if c.score_mod:  # of no sequence, or without keys: the score means nothing
            exists = lse > -Float32.inf
            kept = exists if kept is None else kept & exists
        if c.mask_mod:
            keep = mods.function(c.mask_mod)(*self._where(place, run, column))
            keep = cutlass.Boolean(keep)
            kept = keep if kept is None else kept & keep
        return kept

    def _where(self, place, run, column):
        """What mods are told beside the score: a place that they may read a tensor at."""
        query = imax(imin(run.first_query + column, place.info.seqlen_q - 1), 0)
        return place.batch, place.head, query, place.key, place.info, self.run_time.aux

    def _run(self, tile, place, offset, masked):
        """Queries of a step from an offset on; ``masked`` is static."""
        c, seen, bias = self.config, None, None
        if place is None:
            return Run(offset, None, None, None)
        first, key = place.block * c.tile_m + offset, self._key(tile)
        blocks, lengths = self.tiles.blocks, self.tiles.lengths(tile)
        if masked:
            seen = ~numerics.low_bits(blocks.query_begin(key, *lengths) - first)
            if c.left:
                seen = seen & numerics.low_bits(blocks.query_end(key, *lengths) - first)
        if c.alibi:
            bias = (place.slope, Float32(first + lengths[1] - lengths[0] - key))
        return Run(offset, first, seen, bias)

    def _key(self, tile):
        return tile.n_block * self.config.tile_n + self.rank * ROWS + self.lanes.thread

    def store_p(self, probs):
        """P^T over S^T that this warpgroup has read; run by run it is there already."""
        if self.config.run == self.config.queries:
            self._store_packed(probs, self.tmem.s())

    def _store_packed(self, values, column):
        """Values of both parts: the second lies behind the first."""
        self._store_words(values, column + self.tmem.packed(self.warpgroup, 0))

    def _store_words(self, values, column):
        """16-bit values, two to a column."""
        words = cute.recast_tensor(values, Float32)
        self.lanes.store(words, column, cute.size(words))

    def grad(self, weights, slot):
        """dS^T = P^T (dP^T - D), times the slope of a cap and through a score_mod, in 16 bit.

        A tile of sequences of different lengths that nobody sees has somebody's D, which may be NaN: its dS is 0.
        """
        c = self.config
        grads = cute.make_rmem_tensor(c.queries, element(c))
        if c.score_mod:
            self._grad_by_runs(weights, slot, weights.masked)
            words = cute.recast_tensor(grads, Float32)
            for at in range(cute.size(words)):
                run, j = divmod(at, c.run // 2)
                words[at] = weights.values[run * c.run + j]
        else:
            for part in range(c.query_parts):
                run = Run(self.tmem.loaded(self.warpgroup, part), None, None, None)
                mine, rounded = (some(x, part * CHUNK, CHUNK) for x in (weights.values, grads))
                self._grad_of(mine, rounded, (None, run, 0), slot)
            if weights.masked and c.varlen:
                live = -imin(self.tiles.lengths(weights.tile)[0], 1)  # no queries: nobody sees it
                words = cute.recast_tensor(grads, Int32)
                for j in range(cute.size(words)):
                    words[j] = words[j] & live
        return grads

    @cute.jit
    def _grad_by_runs(self, weights, slot, masked: cutlass.Constexpr):
        """As ``_softmax_by_runs``; a run's dS, two to a register, over the first half of its products."""
        c = self.config
        for number in cutlass.range(c.queries // c.run, unroll=1):
            which = numerics.opaque(number)
            run = self._run(
                weights.tile,
                weights.place,
                self.tmem.loaded_run(self.warpgroup, which, c.run),
                masked,
            )
            piece = chosen(weights.values, which, c.run)
            rounded = cute.make_rmem_tensor(c.run, element(c))
            self._grad_of(piece, rounded, (weights.place, run, 0), slot)
            put(weights.values, which, cute.recast_tensor(rounded, Float32), c.run)

    def _grad_of(self, weights, rounded, at, slot):
        """dS of some queries, rounded, from what softmax left of them."""
        (place, run, begin), width = at, cute.size(weights)
        dp = cute.make_rmem_tensor(width, Float32)
        self.lanes.load(dp, 0, self.tmem.dp() + run.offset + begin, width)
        cute.arch.fence_view_async_tmem_load()
        for first in range(0, width, VECTOR):
            four, differences = some(weights, first, VECTOR), some(dp, first, VECTOR)
            delta = self._vector(1, run, begin + first, slot)
            for j in range(0, VECTOR, 2):
                pair = (differences[j], differences[j + 1])
                pair = cute.arch.add_packed_f32x2(pair, (delta[j], delta[j + 1]))
                if self.config.score_mod:
                    differences[j], differences[j + 1] = pair
                else:
                    four[j], four[j + 1] = cute.arch.mul_packed_f32x2((four[j], four[j + 1]), pair)
            if self.config.score_mod:
                self._modify_back(four, differences, (place, run, begin + first), slot)
        rounded.store(weights.load().to(element(self.config)))

    def _modify_back(self, products, differences, at, slot):
        """dS of four queries over their products, from which P is made again: the derivative takes the score beside it."""
        place, run, column = at
        probs, derivative = copy_of(products), mods.function(self.config.score_mod_bwd)
        known = self._probabilities(probs, at, slot)
        for j in range(VECTOR):
            where = self._where(place, run, column + j)
            gradient = derivative(probs[j] * differences[j], known.given[j], *where)
            # A derivative may be infinite or NaN where nothing is seen.
            gradient = cutlass.select_(known.kept[j], Float32(gradient), Float32(0.0))
            products[j] = gradient * known.slopes[j] if known.slopes else gradient

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
                turn, counted = self._turn(place), self.tiles.has_turn(tile, place.block)
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async.global")
                counts = choose(counted, Int32(1), Int32(0))  # others have no turn
                with cute.arch.elect_one():
                    cute.arch.red(turn, counts, op="add", dtype="s32", sem="release", scope="gpu")

    def drain(self):
        """Wait until all additions are done."""
        cute.arch.cp_async_bulk_wait_group(0)
