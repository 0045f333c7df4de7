"""Verbs of the Ampere forward's schedule, in CuTe: cp.async, ldmatrix, mma.sync, online softmax, store.

A thread has, of each 16 rows (an *atom*) that its warp owns, rows ``lane // 4`` and 8 below, and of each 8 columns two:
an accumulator is (4, N / 8, atoms), of which the first mode is (2 columns, 2 rows).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash4.common import numerics
from flash4.common.geometry import imin
from flash4.common.graph import WARP
from flash4.common.numerics import LN2, LOG2E
from flash4.sm80.copies import RowCopy, ldmatrix, stage_rows, store_chunk
from flash4.sm80.fwd_config import ATOM_ROWS, ELEMENT_BYTES, GROWTH_LOG2, KEY_STEP, ForwardConfig
from flash4.sm80.products import element, multiply, rows_of
from flash4.sm80.scores import Scores, prepare
from flash4.sm80.shared_rows import CHUNK, CHUNK_BYTES


def row_values(S, r):
    """Scores of this thread's row ``r`` as a list."""
    return [S[r, j] for j in range(cute.size(S, mode=[1]))]


def scale_rows(X, factors):
    """Multiply each row of X by its factor."""
    for r in range(cute.size(X, mode=[0])):
        for j in range(cute.size(X, mode=[1])):
            X[r, j] = X[r, j] * factors[r]


@dataclass(frozen=True)
class RowState:
    """Online softmax state of this thread's rows, in registers.

    P = exp2(scale_log2 * S - shift_log2); the shift is the scaled row maximum when it last moved.
    """

    shift_log2: cute.Tensor  # -inf before the first visible key
    total: cute.Tensor  # l: this thread's share of the row sum of P

    @staticmethod
    def of(rows: int):
        """That of so many rows."""
        return RowState(*(cute.make_rmem_tensor(rows, Float32) for _ in range(2)))


def outgrown(S, state, inv_scale_log2):
    """Whether a score of this thread exceeds its row's limit; a negative limit always says yes.

    Compares bits, with half the instructions of a float maximum; exact because the limit is not negative.
    """
    above = None
    for r in range(cute.size(S, mode=[0])):
        limit = numerics.float_bits((state.shift_log2[r] + GROWTH_LOG2) * inv_scale_log2)
        row_above = (numerics.max_bits(row_values(S, r)) > limit) | (limit < 0)
        above = row_above if above is None else above | row_above
    return above


def move_shifts(S, state, scale_log2):
    """Let the shifts follow the exact row maxima where P would outgrow 2^8; returns what O has to be scaled by."""
    corrections = []
    for r in range(cute.size(S, mode=[0])):
        row_max = cute.arch.warp_reduction_max(
            numerics.max_float(row_values(S, r)), threads_in_group=4
        )
        old, scaled = state.shift_log2[r], row_max * scale_log2
        new = cutlass.select_(scaled > old + GROWTH_LOG2, scaled, old)
        # exp2(-inf - -inf) would be NaN: a row without a visible key keeps the factor exp2(-inf) = 0.
        finite = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
        correction = cute.math.exp2(old - finite, fastmath=True)
        state.shift_log2[r] = new
        state.total[r] = state.total[r] * correction
        corrections.append(correction)
    return corrections


@cute.jit
def move_outgrown(S: cute.Tensor, O: cute.Tensor, state, scale_log2, inv_scale_log2):
    """Move shifts, and scale O with them, if a row of the warp has outgrown its own: few blocks have one."""
    if cute.arch.vote_any_sync(outgrown(S, state, inv_scale_log2)):
        scale_rows(O, move_shifts(S, state, scale_log2))


@cute.jit
def clear_rows(O: cute.Tensor, r: cutlass.Constexpr, columns: cutlass.Constexpr, empty):
    """0 in row ``r`` of O where it has no key: O may hold 0 * NaN there. Few warps have such a row."""
    if cute.arch.vote_any_sync(empty):
        for pair in cutlass.range_constexpr(columns // 2):
            for j in (2 * pair, 2 * pair + 1):
                O[r, j] = cutlass.select_(empty, Float32(0.0), O[r, j])


@dataclass(frozen=True)
class ForwardOps:
    """Verbs of ``attend``; registers are this thread's part."""

    config: ForwardConfig
    tiles: object
    scores: Scores
    q: cute.Tensor  # (B, Sq, H, D)
    k: cute.Tensor  # (B, Sk, Hkv, D)
    v: cute.Tensor  # (B, Sk, Hkv, Dv)
    o: cute.Tensor  # (B, Sq, H, Dv)
    lse: cute.Tensor  # (B, H, Sq)
    sQ: Int32  # addresses in shared memory
    sK: Int32
    sV: Int32
    q_row: Int32  # byte of the row and chunk that this lane gives to ldmatrix
    k_row: Int32
    v_row: Int32
    tOrO: cute.Tensor  # (4, tile_dv / 8, atoms)
    state: RowState
    first: cute.Tensor  # (2,) Int64, where the first row of K and of V is
    thread: Int32
    warp: Int32

    @property
    def lane(self):
        """Number of this thread in its warp."""
        return self.thread % WARP

    @property
    def prologue(self):
        """Blocks that are copied before the first is multiplied."""
        return tuple(range(self.config.stages - 1))

    def phases(self, tile):
        """See ``ForwardConfig.phases``."""
        return self.config.phases(tile, self.tiles)

    def begin(self, tile):
        """O = 0, shift = -inf, l = 0; find K and V."""
        self.tOrO.fill(0.0)
        self.state.shift_log2.fill(-Float32.inf)
        self.state.total.fill(0.0)
        place = self.tiles.place(tile)
        for at, x in enumerate((self.k, self.v)):
            self.first[at] = x[place.batch_k, place.row_k, place.head_kv, None].iterator.toint()

    # Copies.

    def copy_q(self, tile):
        """Start the copies of the tile's queries; rows that are not there become zero."""
        c, place = self.config, self.tiles.place(tile)
        copy = RowCopy.of(c.rows_q, c.threads, self.thread, self.q.shape[3])
        for step in range(copy.steps):
            query, head, exists = self._row(tile, place, copy.row_of(step))
            row = self.q[place.batch_q, place.row_q + query, head, None]
            address = row.iterator.toint() + Int64(copy.chunk * CHUNK_BYTES)
            copy.copy_row(self.sQ, step, address, exists)

    def _row(self, tile, place, row):
        """(query, head, whether they exist) of a row of the tile."""
        c = self.config
        heads_per_kv = self.lse.shape[1] // self.tiles.grid.heads_kv
        query = tile.m_block * c.tile_q + row // c.pack
        head_in_kv = place.group * c.pack + row % c.pack
        exists = (query < place.stored_q) & (head_in_kv < heads_per_kv)
        return query, place.head_kv * heads_per_kv + head_in_kv, exists

    def copy_first(self, tile, i):
        """Start the copies of block ``i`` of the prologue; only the last block has rows behind the keys: they become zero."""
        if i == 0:
            first = (tile.first_block + tile.n_blocks - 1) * self.config.tile_n
            self._copy_block(tile, 0, self.tiles.lengths(tile)[1] - first)
        else:
            self._copy_if(tile, i)

    def copy_next(self, tile, i):
        """Start the copies of the block that many stages behind block ``i``, if there is one."""
        self._copy_if(tile, i + self.config.stages - 1)

    @cute.jit
    def _copy_if(self, tile, i):
        if i < tile.n_blocks:
            self._copy_block(tile, i, None)

    def _copy_block(self, tile, i, count):
        """Copy block ``i``, counted from the tile's last; ``count`` of its rows exist, None for all."""
        c = self.config
        first_row = (tile.first_block + tile.n_blocks - 1 - i) * c.tile_n
        operands = ((self.k, c.rows_k, self.sK), (self.v, c.rows_v, self.sV))
        for at, (x, rows, base) in enumerate(operands):
            copy = RowCopy.of(rows, c.threads, self.thread, x.shape[3])
            stride = Int64(x.stride[1]) * ELEMENT_BYTES
            # Of two parts, of which all threads have the first: addresses of its own would cost a thread too many registers.
            address = self.first[at] + Int64(first_row) * stride
            address = address + Int64(copy.row) * stride + Int64(copy.chunk * CHUNK_BYTES)
            copy.copy(base + i % c.stages * rows.nbytes, address, stride, count)

    def commit(self):
        """Close a group of copies; it may be empty."""
        cute.arch.cp_async_commit_group()

    def wait_copies(self):
        """Wait until this thread's copies of the block that comes next have landed."""
        cute.arch.cp_async_wait_group(self.config.stages - 2)

    def sync(self):
        """Meet all warps of the CTA."""
        cute.arch.sync_threads()

    # Products.

    def _load_q(self, base, k, m):
        """Q of 16 head dims and the rows of an atom."""
        rows = self.config.rows_q
        at = rows.pair_at(base, k)
        return ldmatrix(element(self.config), at + m * ATOM_ROWS * rows.row_bytes, False)

    def qk(self, i):
        """S = Q K^T of block ``i``."""
        c, rows = self.config, self.config.rows_k
        S = cute.make_rmem_tensor((4, c.tile_n // 8, c.atoms), Float32)
        S.fill(0.0)
        # Opaque, or swizzled addresses would be kept in registers around the loop.
        q_at = (
            self.sQ + self.warp * (c.warp_rows * c.rows_q.row_bytes) + numerics.opaque(self.q_row)
        )
        k_at = self.sK + self.k_row + i % c.stages * rows.nbytes
        for k in range(c.tile_d // 16):
            tSrQ = [self._load_q(q_at, k, m) for m in range(c.atoms)]
            at = rows.pair_at(k_at, k)
            for n in range(0, c.tile_n // 8, 2):
                tSrK = ldmatrix(element(c), at + n * 8 * rows.row_bytes, False)
                multiply(c, S, tSrQ, tSrK, n)
        return S

    def softmax_pv(self, i, s, phase):
        """P = exp2(scale_log2 S - shift), l += rowsum P, O += P V, 16 keys at a time.

        So the exponentials of the next 16 keys run beside the products of these.
        """
        c, state, rows_v, S = self.config, self.state, self.config.rows_v, rows_of(s)
        shifts = [state.shift_log2[r] for r in range(2 * c.atoms)]
        if phase.masked or c.may_hide_any:  # a row without a key yet: exp2(-inf - 0) = 0
            shifts = [cutlass.select_(x == -Float32.inf, Float32(0.0), x) for x in shifts]
        v_at = self.sV + self.v_row + i % c.stages * rows_v.nbytes
        sums = [None] * (2 * c.atoms)
        steps, following = c.tile_n // KEY_STEP, None
        tOrP = [self._probabilities(S, m, 0, shifts, sums) for m in range(c.atoms)]
        for step in range(steps):
            if step + 1 < steps:
                following = [
                    self._probabilities(S, m, step + 1, shifts, sums) for m in range(c.atoms)
                ]
            for group in range(c.tile_dv // 16):
                at = rows_v.pair_at(v_at, group)
                tOrV = ldmatrix(element(c), at + step * KEY_STEP * rows_v.row_bytes, True)
                multiply(c, self.tOrO, tOrP, tOrV, 2 * group)
            if step + 1 < steps:  # or ptxas would compute all exponentials before the first product
                numerics.settle(numerics.sum_of(sums))
                tOrP = following
        for r in range(2 * c.atoms):  # block by block: single terms would vanish beside a long row
            state.total[r] = state.total[r] + sums[r]

    def _probabilities(self, S, m, step, shifts, sums):
        """P of 16 keys and the rows of atom ``m`` as operand of P V; adds to its rows' ``sums``."""
        P = cute.make_rmem_tensor((4, 2), Float32)
        P_rows = cute.make_tensor(P.iterator, cute.make_layout((2, (2, 2)), stride=(2, (1, 4))))
        for h in range(2):
            r = 2 * m + h
            p = []
            for j in range(4):
                log2_p = S[r, 4 * step + j] * self.scores.scale_log2 - shifts[r]
                p.append(cute.math.exp2(log2_p, fastmath=True))
                P_rows[h, j] = p[j]
            part = (p[0] + p[1]) + (p[2] + p[3])
            sums[r] = part if sums[r] is None else sums[r] + part
        tOrP = cute.make_rmem_tensor((4, 2), element(self.config))
        tOrP.store(P.load().to(element(self.config)))
        return tOrP

    # Softmax.

    def move_shift(self, tile, i, s, phase):
        """Change scores and mask them; let the shift follow the maximum, and O and l the shift."""
        S, scores = rows_of(s), self.scores
        prepare(self, tile, i, S, phase.masked)
        scales_log2 = (scores.scale_log2, scores.inv_scale_log2)
        move_outgrown(S, rows_of(self.tOrO), self.state, *scales_log2)

    def query_row(self, r):
        """Row in the tile of this thread's row ``r``."""
        return self.warp * self.config.warp_rows + self.lane // 4 + (r // 2 * ATOM_ROWS + r % 2 * 8)

    def query(self, tile, r):
        """Query of that row."""
        return tile.m_block * self.config.tile_q + self.query_row(r) // self.config.pack

    def head(self, place, r):
        """Query head of that row; the last one for packed rows that have none."""
        heads, pack = self.lse.shape[1], self.config.pack
        head_in_kv = place.group * pack + self.query_row(r) % pack
        return imin(place.head_kv * (heads // self.tiles.grid.heads_kv) + head_in_kv, heads - 1)

    # Results.

    def store(self, tile):
        """O / l and LSE = ln 2 (shift + log2 l) to global memory; a row without keys gives 0, and -inf or its sink."""
        place = self.tiles.place(tile)
        self._finish_rows(tile, place)
        self._store_o(tile, place)

    @cute.jit
    def _finish_rows(self, tile, place):
        c, state, mLSE, O = self.config, self.state, self.lse, rows_of(self.tOrO)
        for r in cutlass.range_constexpr(2 * c.atoms):
            total = cute.arch.warp_reduction_sum(state.total[r], threads_in_group=4)
            empty = total == 0.0
            query, head, exists = self._row(tile, place, self.query_row(r))
            lse = (state.shift_log2[r] + cute.math.log2(total, fastmath=True)) * LN2
            lse = cutlass.select_(empty, -Float32.inf, lse)
            inverse = cute.arch.rcp_approx(total)
            if cutlass.const_expr(c.sink):
                sink = self.scores.sink[self.head(place, r)]
                lse, inverse = with_sink(state.shift_log2[r], total, sink)
            if cutlass.const_expr(c.varlen):  # rows in memory may be of no sequence, or not in use
                unused = query >= self.tiles.lengths(tile)[0]
                empty = empty | unused
                lse = cutlass.select_(unused, -Float32.inf, lse)
            clear_rows(O, r, c.tile_dv // 4, empty)
            inverse = cutlass.select_(empty, Float32(0.0), inverse)
            for pair in cutlass.range_constexpr(c.tile_dv // 8):
                for j in (2 * pair, 2 * pair + 1):
                    O[r, j] = O[r, j] * inverse
            if (self.lane % 4 == 0) & exists:
                mLSE[place.batch_q, head, place.row_q + query] = lse

    @cute.jit
    def _store_o(self, tile, place):
        """Registers -> this warp's rows of Q's memory, which nobody else reads -> 16 bytes at a time to global memory."""
        c, rows, mO = self.config, self.config.rows_o, self.o
        first_row = self.warp * c.warp_rows
        if cutlass.const_expr(c.rows_o.nbytes != c.rows_q.nbytes):
            cute.arch.sync_threads()  # another warp's rows of Q may lie there
        stage_rows(c, self.tOrO, self.sQ, rows, first_row, self.lane)
        cute.arch.sync_warp()
        lanes_per_row = rows.chunks
        for step in cutlass.range_constexpr(c.warp_rows * lanes_per_row // 32):
            row = first_row + self.lane // lanes_per_row + step * (32 // lanes_per_row)
            chunk = self.lane % lanes_per_row
            query, head, exists = self._row(tile, place, row)
            for band in cutlass.range_constexpr(rows.bands):
                column = band * rows.band + chunk * CHUNK
                if exists & (column < mO.shape[3]):
                    at = self.sQ + rows.at(row, chunk) + band * rows.band_bytes
                    target = mO[place.batch_q, place.row_q + query, head, None]
                    store_chunk(element(c), at, target.iterator + column)


def with_sink(shift_log2, total, sink):
    """(LSE, factor of O) of a row whose denominator has exp(sink) too, however far that is from exp2(shift)."""
    sink_log2 = sink * LOG2E
    new = cute.arch.fmax(shift_log2, sink_log2)
    finite = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
    shrink = cute.math.exp2(shift_log2 - finite, fastmath=True)
    total = total * shrink + cute.math.exp2(sink_log2 - finite, fastmath=True)
    lse = (new + cute.math.log2(total, fastmath=True)) * LN2
    return lse, shrink * cute.arch.rcp_approx(total)
