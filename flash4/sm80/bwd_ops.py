"""Verbs of the Ampere backward's schedule, in CuTe: products, P and dS, additions to dQ, store.

Rows of S and dP are keys. Accumulators are as in ``products``: this thread's columns are queries
``8 j + 2 (lane % 4) + {0, 1}``.
"""

from dataclasses import dataclass
from itertools import product

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash4.common import mods, numerics
from flash4.common.dsl import inline_ptx
from flash4.common.geometry import choose
from flash4.common.graph import WARP
from flash4.common.mod_places import ModPlace, Pair
from flash4.common.numerics import LOG2E
from flash4.sm80.bwd_config import FLOAT_BYTES, WHOLE, BackwardConfig
from flash4.sm80.copies import (
    RowCopy,
    cp_async,
    ldmatrix,
    put_rows,
    stage_rows,
    store_chunk,
)
from flash4.sm80.fwd_config import ATOM_ROWS, ELEMENT_BYTES, KEY_STEP
from flash4.sm80.products import element, multiply, rows_of
from flash4.sm80.shared_rows import CHUNK, CHUNK_BYTES

FLOATS = CHUNK_BYTES // FLOAT_BYTES  # that one copy takes


@dataclass(frozen=True)
class RunTime:
    """What crosses the launch besides q, k, v, dout, dk and dv; None where the config has no such feature."""

    lse: cute.Tensor  # (B, H, padded Sq), float32, log2 units; +inf where P must vanish
    delta: cute.Tensor  # (B, H, padded Sq), float32
    sums: cute.Tensor  # (B, H, blocks, tile_m tile_d), float32
    scale: Float32  # factor of a score
    cap: object  # in log2 units unless the config is natural
    cap_scale: object  # factor of a score within the cap
    slopes: object  # (B, H), float32
    turns: object  # (B, H, blocks, 2), int32, additions to a block
    aux: object  # tuple of tensors that mods read


def add_float(address, x):
    """Add to a float32 in global memory, in any order with others."""
    inline_ptx(None, "l,f", "red.global.add.f32 [$0], $1;", address, x, side_effects=True)


def wait_for_count(address, count):
    """Wait until the number at an address in global memory is at least ``count``."""
    text = (
        "{ .reg .pred p; .reg .s32 v; AGAIN: ld.acquire.gpu.global.s32 v, [$0]; "
        "setp.lt.s32 p, v, $1; @p bra AGAIN; }"
    )
    inline_ptx(None, "l,r,~{memory}", text, address, Int32(count), side_effects=True)


def add_to_count(address, amount):
    """Add to the number at an address in global memory, behind what this thread knows of."""
    text = "fence.acq_rel.gpu; red.release.gpu.global.add.s32 [$0], $1;"
    inline_ptx(None, "l,r,~{memory}", text, address, Int32(amount), side_effects=True)


def load_pair(shared):
    """Two neighbouring float32 of shared memory."""
    pointer = cute.make_ptr(Float32, shared, cute.AddressSpace.smem, assumed_align=8)
    pair = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
    return pair


@dataclass(frozen=True)
class Shared:
    """Addresses in shared memory."""

    q: Int32
    k: Int32
    v: Int32
    do: Int32
    ds: Int32
    p: object  # None where warps keep it in registers
    lse: Int32
    delta: Int32


@dataclass(frozen=True)
class BackwardOps:
    """Verbs of ``differentiate``; registers are this thread's part."""

    config: BackwardConfig
    tiles: object
    run_time: RunTime
    q: cute.Tensor  # (B, Sq, H, D)
    k: cute.Tensor  # (B, Sk, Hkv, D)
    v: cute.Tensor  # (B, Sk, Hkv, Dv)
    do: cute.Tensor  # (B, Sq, H, Dv)
    dk_out: cute.Tensor  # (B, Sk, Hkv, D)
    dv_out: cute.Tensor  # (B, Sk, Hkv, Dv)
    shared: Shared
    dk_acc: object  # (4, tile_d / 8 / column_parts, sum_atoms); None in a role without dK
    dv_acc: object  # the same of tile_dv
    thread: Int32
    warp: Int32

    @property
    def copies_ahead(self) -> bool:
        """Whether the next step's copies go on beside this one."""
        return self.config.stages > 1

    @property
    def keeps_p(self) -> bool:
        """Whether P and dS of a warp's keys are its own."""
        return self.config.keeps_p

    @property
    def asks_for_lanes(self) -> bool:
        """See ``BackwardConfig.asks_for_lanes``."""
        return self.config.asks_for_lanes()

    @property
    def lane(self):
        """Number of this thread in its warp. Opaque, or what follows from it would be kept in registers around the loop."""
        if self.asks_for_lanes:
            return numerics.lane_asked_for()
        # Not %: its sign, which is not known, would take instructions.
        return numerics.opaque(self.thread) & 31

    @property
    def first_row(self):
        """First of this warp's keys in the tile."""
        return self.warp % self.config.key_warps * (self.config.key_atoms * ATOM_ROWS)

    @property
    def part(self):
        """Which part of the queries this warp has of those with the same keys."""
        return self.warp // self.config.key_warps

    @property
    def first_sum_row(self):
        """First of this warp's keys of dK or dV."""
        return self.first_row

    @property
    def column_part(self):
        """Which part of the columns of dK or dV this warp has."""
        return self.part

    def phases(self, tile):
        """See ``KvSteps.phases``."""
        return self.tiles.phases(tile)

    def begin(self, tile):
        """dK = dV = 0."""
        for acc in (self.dk_acc, self.dv_acc):
            if acc is not None:
                acc.fill(0.0)

    # Copies.

    def copy_keys(self, tile):
        """Start the copies of the tile's K and V; rows behind the keys become zero."""
        c, where = self.config, self.tiles.where(tile)
        first = tile.n_block * c.tile_n
        count = self.tiles.lengths(tile)[1] - first
        for x, name, base in ((self.k, "k", self.shared.k), (self.v, "v", self.shared.v)):
            place = (where.entry_k, where.row_k + first, tile.head_kv)
            self._copy(x, c.rows(name), place, base, (count, c.threads))

    @cute.jit
    def copy_step(self, tile, i):
        """Start the copies of what step ``i`` needs, if there is one; rows behind the queries become zero."""
        if i < tile.steps:
            self._copy_step(tile, i)

    def _copy_step(self, tile, i):
        c, where, (block, head) = self.config, self.tiles.where(tile), self.tiles.place(tile, i)
        slot, first = i % c.stages, block * c.tile_m
        count, entry = self.tiles.lengths(tile)[0] - first, numerics.opaque(where.entry_q)
        for x, name, base in ((self.q, "q", self.shared.q), (self.do, "do", self.shared.do)):
            at = base + slot * c.rows(name).nbytes
            place = (entry, where.row_q + first, head)
            self._copy(x, c.rows(name), place, at, (count, c.role_warps * WARP))
        sources = ((self.run_time.lse, self.shared.lse), (self.run_time.delta, self.shared.delta))
        # What a tile that nobody sees would find there is another sequence's, and may be NaN.
        nbytes = choose(count > 0, CHUNK_BYTES, 0) if c.varlen else None
        for x, base in sources:
            row = x[entry, head, None].iterator + (where.slot_q + block) * c.tile_m
            self._copy_floats(row.toint(), base + slot * c.statistics_bytes, nbytes)

    def _copy(self, x, rows, place, base, counts):
        """Copy the rows of an array from (entry, row, head) of x on; ``counts`` are rows that exist, and threads that copy."""
        (entry, first, head), (count, threads) = place, counts
        thread = numerics.opaque(self.thread) & (threads - 1)  # not negative
        copy = RowCopy.of(rows, threads, thread, x.shape[3])
        stride = Int64(x.stride[1]) * ELEMENT_BYTES
        address = x[entry, first, head, None].iterator.toint() + Int64(copy.row) * stride
        copy.copy(base, address + Int64(copy.chunk * CHUNK_BYTES), stride, count)

    @cute.jit
    def _copy_floats(self, address, base, nbytes):
        """Copy a statistic of a step's queries; of ``nbytes`` 0 it becomes zero, None is all."""
        thread = self.thread & (self.config.role_warps * WARP - 1)
        if thread < self.config.tile_m // FLOATS:
            offset = thread * CHUNK_BYTES
            cp_async(base + offset, address + Int64(offset), nbytes)

    def commit(self):
        """Close a group of copies; it may be empty."""
        cute.arch.cp_async_commit_group()

    def wait_copies(self):
        """Wait until this thread's copies have landed."""
        cute.arch.cp_async_wait_group(0)

    def sync(self):
        """Meet all warps of the CTA."""
        cute.arch.sync_threads()

    # Products.

    def _product(self, a, b, i, run):
        """Rows of this warp's keys of ``a`` times a run of this warp's part of the queries of slot ``i`` of ``b``, transposed."""
        c = self.config
        (rows_a, base_a), (rows_b, base_b) = a, b
        own, columns = c.tile_m // c.splits, len(run.of(c.tile_m // c.splits))
        acc = cute.make_rmem_tensor((4, columns // 8, c.key_atoms), Float32)
        acc.fill(0.0)
        lane = self.lane
        at_a = base_a + rows_a.of_lane(lane, by_columns=False) + self.first_row * rows_a.row_bytes
        at_b = base_b + rows_b.of_lane(lane, by_columns=True) + i % c.stages * rows_b.nbytes
        at_b = at_b + (self.part * own + run.number * columns) * rows_b.row_bytes
        for step in range(rows_a.columns // 16):
            a = self._atoms(rows_a, rows_a.pair_at(at_a, step), c.key_atoms)
            at = rows_b.pair_at(at_b, step)
            for group in range(0, columns // 8, 2):
                b_atom = ldmatrix(element(c), at + group * 8 * rows_b.row_bytes, False)
                multiply(c, acc, a, b_atom, group)
        return acc

    def _atoms(self, rows, at, count):
        """16 columns of 16 rows, and of those behind them."""
        down = ATOM_ROWS * rows.row_bytes
        return [ldmatrix(element(self.config), at + m * down, False) for m in range(count)]

    def s(self, i, run=WHOLE):
        """S^T = K Q^T."""
        c = self.config
        return self._product((c.rows("k"), self.shared.k), (c.rows("q"), self.shared.q), i, run)

    def dp(self, i, run=WHOLE):
        """dP^T = V dO^T."""
        c = self.config
        return self._product((c.rows("v"), self.shared.v), (c.rows("do"), self.shared.do), i, run)

    def dv(self, i, p, run=WHOLE):
        """dV += P^T dO."""
        self._accumulate(self.dv_acc, (p, self.shared.p), ("do", self.shared.do), i, run)

    def dk(self, i, ds, run=WHOLE):
        """dK += dS^T Q."""
        self._accumulate(self.dk_acc, (ds, self._ds(i)), ("q", self.shared.q), i, run)

    def _accumulate(self, acc, a, b, i, run):
        """Add the product of P or dS, from registers or else shared memory, and columns of dO or Q, over a run of queries."""
        c, (a, base_a), (name, base) = self.config, a, b
        rows, rows_a, lane = c.rows(name), c.rows("ds"), self.lane
        at_b = base + rows.of_lane(lane, by_columns=False) + i % c.stages * rows.nbytes
        count = acc.shape[1] // 2
        pairs = rows.run_of_pairs(
            at_b, self.column_part * count if c.column_parts > 1 else 0, count
        )
        at_a = 0
        if not self.keeps_p:
            at_a = base_a + rows_a.of_lane(lane, by_columns=False)
            at_a = at_a + self.first_sum_row * rows_a.row_bytes
        steps = run.of(c.tile_m // 16)
        for step in steps:
            if self.keeps_p:
                down, first = cute.size(a) // c.sum_atoms, 8 * (step - steps[0])
                atoms = [
                    cute.make_tensor(a.iterator + (first + m * down), cute.make_layout(8))
                    for m in range(c.sum_atoms)
                ]
            else:
                atoms = self._atoms(rows_a, rows_a.pair_at(at_a, step), c.sum_atoms)
            for number, at in enumerate(pairs):
                b_atom = ldmatrix(element(c), at + step * KEY_STEP * rows.row_bytes, True)
                multiply(c, acc, atoms, b_atom, 2 * number)

    def dq(self, i=0, run=None):
        """A run of the queries of this warp's part of dQ = dS K; the first, which may be all, if none is given."""
        c, lane = self.config, self.lane
        run = c.runs_of_dq(0)[0] if run is None else run
        queries, columns = c.dq_shape
        rows_ds, rows_k = c.rows("ds"), c.rows("k")
        atoms = run.of(queries // ATOM_ROWS)
        dQ = cute.make_rmem_tensor((4, columns // 8, len(atoms)), Float32)
        dQ.fill(0.0)
        at_ds = self._ds(i) + rows_ds.of_lane(lane, by_columns=True)
        at_k = self.shared.k + rows_k.of_lane(lane, by_columns=False)
        first_query = self.warp % c.query_warps * (queries // 16)
        first_column = self.warp // c.query_warps * (columns // 16)
        at_ds = rows_ds.run_of_pairs(at_ds, first_query, queries // 16)[atoms[0] : atoms[-1] + 1]
        at_k = rows_k.run_of_pairs(at_k, first_column, columns // 16)
        for step in range(c.tile_n // KEY_STEP):
            down_ds, down_k = (step * KEY_STEP * rows.row_bytes for rows in (rows_ds, rows_k))
            ds = [ldmatrix(element(c), at + down_ds, True) for at in at_ds]
            for number, at in enumerate(at_k):
                multiply(c, dQ, ds, ldmatrix(element(c), at + down_k, True), 2 * number)
        return dQ

    def _ds(self, i):
        """Where dS of a step is."""
        c = self.config
        if c.ds_slots == 1:
            return self.shared.ds
        return self.shared.ds + i % c.ds_slots * c.rows("ds").nbytes

    # P and dS.

    def softmax(self, tile, i, s, dp, phase):
        """P^T = exp2(scale_log2 S^T - LSE) and dS^T = P^T (dP^T - D), in 16 bit; hidden pairs give 0.

        dS^T is through a score_mod, and times the slope of the cap.
        """
        c, S, dP = self.config, rows_of(s), rows_of(dp)
        lane = self.lane
        slot, first = i % c.stages * c.statistics_bytes, 2 * (lane % 4)
        first = first + self.part * (c.tile_m // c.splits)
        placed = phase.masked or c.alibi or c.has_mods
        place = self._place(tile, i, first, lane) if placed else None
        P = cute.make_rmem_tensor(s.layout, Float32)
        P_rows = rows_of(P)
        for pair in range(cute.size(S, mode=[1]) // 2):
            offset = slot + (8 * pair + first) * FLOAT_BYTES
            lse = load_pair(self.shared.lse + offset)
            delta = load_pair(self.shared.delta + offset)
            for e in range(2):
                j = 2 * pair + e
                for r in range(2):
                    at = (place, r, j)
                    found = self._pair(S[r, j], lse[e], at, phase.masked)
                    P_rows[r, j] = found.p
                    dP[r, j] = self._gradient(found, found.p * (dP[r, j] - delta[e]), at)
                    if c.mods_apart(r):
                        numerics.settle(found.p)
        rounded = []
        for x in (P, dp):
            rounded.append(cute.make_rmem_tensor(x.layout, element(c)))
            rounded[-1].store(x.load().to(element(c)))
        return tuple(rounded)

    def _pair(self, product, lse, at, masked):
        """What is known of the pair of row and column ``at``, from its product and its query's LSE."""
        c, (place, r, j), seen = self.config, at, None
        score, slope = product * self._in_units(self.run_time.scale), None
        if c.softcap:
            score, slope = numerics.tanh_and_slope(product * self.run_time.cap_scale)
            score = score * self.run_time.cap
        if c.score_mod:
            score = score - self._bias(place, r, j) if c.alibi else score
            modified = mods.function(c.score_mod)(score, *place.mods.at(r, j, self.run_time.aux))
            logit = Float32(modified) * LOG2E - lse
            seen = lse < Float32.inf  # of no sequence, or without keys: the score means nothing
        else:
            logit = score - lse
            logit = logit - self._bias(place, r, j) if c.alibi else logit
        if masked:
            inside = self._inside(place, r, j)
            seen = inside if seen is None else seen & inside
        if c.mask_mod:
            kept = mods.function(c.mask_mod)(*place.mods.at(r, j, self.run_time.aux))
            seen = cutlass.Boolean(kept) if seen is None else seen & cutlass.Boolean(kept)
        if seen is not None:
            logit = cutlass.select_(seen, logit, -Float32.inf)
        return Pair(cute.math.exp2(logit, fastmath=True), score, slope, seen)

    def _gradient(self, pair, ds, at):
        """DS of a pair from P (dP - D): through a score_mod, and times the slope of the cap."""
        c, (place, r, j) = self.config, at
        if c.score_mod:
            where = place.mods.at(r, j, self.run_time.aux)
            ds = mods.function(c.score_mod_bwd)(ds, pair.score, *where)
            # A derivative may be infinite or NaN where nothing is seen.
            ds = cutlass.select_(pair.seen, Float32(ds), Float32(0.0))
        return ds if pair.slope is None else ds * pair.slope

    def _in_units(self, x):
        """A number for scores in the units that they have."""
        return x if self.config.natural else x * LOG2E

    def _bias(self, place, r, j):
        """slope |p - j|, with p the query's position among the keys."""
        distance = place.distances[r] + Float32(8 * (j // 2) + j % 2)
        return place.slope * cute.math.absf(distance)

    def _inside(self, place, r, j):
        """Whether causal masks, windows and lengths let the query of column ``j`` see the key of row ``r``."""
        column = 8 * (j // 2) + j % 2
        inside = Int32(column) >= place.begins[r]
        return inside & (Int32(column - 8 * r) < place.end) if self.config.left else inside

    def _place(self, tile, i, first, lane):
        """What masks and biases of step ``i`` depend on, for this thread's columns from ``first`` on."""
        c, tiles, (block, head) = self.config, self.tiles, self.tiles.place(tile, i)
        lengths, first_query = tiles.lengths(tile), block * c.tile_m + first
        key = tile.n_block * c.tile_n + self.first_row + lane // 4
        keys, slope, place = tuple(key + 8 * r for r in range(2 * c.key_atoms)), None, None
        if c.alibi:
            slope = self._in_units(self.run_time.slopes[tiles.where(tile).batch, head])
        if c.has_mods:
            place = ModPlace.of(tiles, tile, head, first_query, keys)
        # Without queries nothing else hides scores, and biases may let them overflow: then there are no keys either.
        seen = choose(lengths[0] > 0, lengths[1], 0) if c.varlen else lengths[1]
        begins = (tiles.blocks.query_begin(key, lengths[0], seen) for key in keys)
        return StepPlace(
            begins=tuple(begin - first_query for begin in begins),
            end=tiles.blocks.window_end(key, *lengths) - first_query if c.left else None,
            distances=tuple(Float32(first_query + lengths[1] - lengths[0] - key) for key in keys),
            slope=slope,
            mods=place,
        )

    def put_ds(self, p, ds):
        """dS^T, and P^T where warps with the same keys have split it, into shared memory."""
        c = self.config
        first_group = self.part * (c.tile_m // c.splits // 8) if c.splits > 1 else 0
        put_rows(ds, self.shared.ds, c.rows("ds"), self.first_row, self.lane, first_group)
        if not self.keeps_p:
            put_rows(p, self.shared.p, c.rows("p"), self.first_row, self.lane, first_group)

    # dQ.

    @cute.jit
    def wait_turn(self, tile, i):
        """Wait until all tiles whose turn comes first have added theirs, if their order is fixed."""
        if cutlass.const_expr(self.config.ordered):
            if self.thread == 0:
                wait_for_count(self._turn(tile, i), self.tiles.rank(tile, i))
            cute.arch.sync_threads()

    @cute.jit
    def pass_turn(self, tile, i):
        """Let the next tile add, once all warps have."""
        if cutlass.const_expr(self.config.ordered):
            cute.arch.sync_threads()
            if self.thread == 0:
                asked = choose(self.tiles.rank(tile, i) >= 0, 1, 0)  # others have no turn
                add_to_count(self._turn(tile, i), asked)

    def _turn(self, tile, i):
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        turns = self.run_time.turns[where.entry_q, head, where.slot_q + block, None]
        return turns.iterator.toint()

    def add_dq(self, tile, i, dq):
        """Sums += dQ, for the queries of step ``i``: of the first run, and of the others, which are multiplied now."""
        first, *others = self.config.runs_of_dq(0)
        self.add_run(tile, i, dq, first)
        for run in others:
            cute.arch.sync_warp()  # or their products would begin before the registers are free
            self.add_run(tile, i, self.dq(i, run), run)

    def add_run(self, tile, i, dq, run):
        """Sums += a run of dQ; see ``fragments.warp_dq_place`` for their order."""
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        # Opaque, or its products with strides would stay in registers around the loop.
        entry = numerics.opaque(where.entry_q)
        sums = self.run_time.sums[entry, head, where.slot_q + block, None]
        address = sums.iterator.toint() + Int64(self.thread * FLOAT_BYTES)
        numbers, groups, atoms = dq.shape
        for m, group, k in product(range(atoms), range(groups), range(numbers)):
            offset = (
                (((run.number * atoms + m) * groups + group) * numbers + k)
                * self.config.threads
                * FLOAT_BYTES
            )
            add_float(address + Int64(offset), dq[k, group, m])

    # Results.

    def store(self, tile):
        """dK (scaled) and dV of this warp's keys to global memory, through the memory of K and V."""
        c, shared = self.config, self.shared
        if self.dk_acc is not None:
            for number in range(cute.size(self.dk_acc)):
                self.dk_acc[number] = self.dk_acc[number] * self.run_time.scale
        outs = (
            (self.dk_acc, self.dk_out, "k", shared.k),
            (self.dv_acc, self.dv_out, "v", shared.v),
        )
        for acc, _, name, base in outs:
            if acc is not None:
                groups = acc.shape[1]
                first_group = self.column_part * groups if c.column_parts > 1 else 0
                stage_rows(c, acc, base, c.rows(name), self.first_sum_row, self.lane, first_group)
        self.sync()
        for _, x, name, base in outs:
            self._store_rows(tile, x, c.rows(name), base)

    @cute.jit
    def _store_rows(self, tile, x, rows: cutlass.Constexpr, base):
        """Rows of the tile, 16 bytes of each thread at a time; those that no sequence stores are left alone."""
        c, where = self.config, self.tiles.where(tile)
        first = tile.n_block * c.tile_n
        stride = c.threads // rows.chunks
        for step in cutlass.range_constexpr(cute.ceil_div(c.tile_n, stride)):
            row, chunk = self.thread // rows.chunks + step * stride, self.thread % rows.chunks
            exists = (row < c.tile_n) & (first + row < where.stored_k)
            for band in cutlass.range_constexpr(rows.bands):
                column = band * rows.band + chunk * CHUNK
                if exists & (column < x.shape[3]):
                    at = base + rows.at(row, chunk) + band * rows.band_bytes
                    target = x[where.entry_k, where.row_k + first + row, tile.head_kv, None]
                    store_chunk(element(c), at, target.iterator + column)


@dataclass(frozen=True)
class StepPlace:
    """Where a step lies, by this thread's two keys; queries and distances from its first column on."""

    begins: tuple  # columns before this one do not see the key
    end: object  # nor, of the first key, do those from this one on; of each next key 8 later. LSE hides what is behind the last query
    distances: tuple  # from key to query, in keys
    slope: object  # of ALiBi in the units of scores, or None
    mods: object  # ModPlace, or None
