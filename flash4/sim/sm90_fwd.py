"""The Hopper forward on a CPU: its own roles and tile schedule, with verbs in NumPy.

Arithmetic is float32, rounded to 16 bit where the kernel rounds. A warpgroup has 64 rows, of which each warp has 16:
a warp decides for all its rows whether their softmax shift moves, as in the kernel.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from flash4.common import mods
from flash4.common.dsl import plain
from flash4.common.geometry import Phase
from flash4.common.graph import WARP, WARPGROUP
from flash4.common.mods import SeqlenInfo
from flash4.common.numerics import (
    LN2,
    LOG2E,
    TANH_MIDDLE,
    TANH_MIDDLE_END,
    TANH_NEAR_END,
    usual_factors,
)
from flash4.common.tiles import TileSchedule
from flash4.common.varlen import VarlenSchedule
from flash4.problem import CallOptions
from flash4.sim.barriers import NamedBarrier
from flash4.sim.calls import ForwardCall, round_to_16_bit
from flash4.sim.cluster import Cluster, Cta
from flash4.sim.handout import (
    HostDenseSlots,
    HostGivenDense,
    HostGivenTiles,
    HostSlots,
    HostToldDense,
    HostToldTiles,
    shared_out,
)
from flash4.sim.limits import check_graph
from flash4.sim.machine import Machine
from flash4.sim.memory import Fragment, Region, Space
from flash4.sim.rings import End, MmaQueue, Ring, SharedRing, Turn
from flash4.sm90.fwd_cap import (
    BELOW,
    NEAR_OUTER,
    PART_COLUMNS,
    ROOM_LOG2,
    SMALL_OUTER,
    TRUST_LOG2,
    factors_of_near,
)
from flash4.sm90.fwd_config import (
    ELEMENT_BYTES,
    MARKS,
    MMA_ROWS,
    PASSES,
    SMEM_LIMIT,
    TRUSTED_LOG2,
    ForwardConfig,
)
from flash4.sm90.fwd_ops import BARRIER_Q_READ, BARRIER_STORE, BARRIER_TURN
from flash4.sm90.fwd_roles import ForwardRoles
from flash4.sm90.fwd_tiles import BARRIER_PASS

WARP_ROWS = 16
MMA_K = 16  # columns of A that one WGMMA multiplies


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a b in steps of ``MMA_K``: like the hardware, and too small for BLAS to spread over slow threads."""
    steps = range(0, a.shape[1], MMA_K)
    return sum(a[:, i : i + MMA_K] @ b[i : i + MMA_K] for i in steps)


def cap_scores(s: np.ndarray, inner: np.float32, outer: np.float32, ways: int = 3) -> np.ndarray:
    """Return outer tanh(inner s), each warp in the way that the largest sum of two neighbours allows."""
    pairs = np.abs(s[:, 0::2]) + np.abs(s[:, 1::2])
    used = np.repeat(pairs.reshape(-1, WARP_ROWS * pairs.shape[1]).max(1), WARP_ROWS)[:, None]
    x = s * inner
    square = np.minimum(x * x, np.float32(1))  # no overflow where the others are not taken
    middle = x * np.polynomial.polynomial.polyval(square, np.float32(TANH_MIDDLE)) * outer
    is_near = (used <= TANH_NEAR_END / inner) & usual_factors(inner, outer) & (ways > 1)
    is_middle = (used <= TANH_MIDDLE_END / inner) & (ways == 3)
    other = np.where(is_middle, middle, np.tanh(x) * outer)
    return np.where(is_near, near_scores(np.where(is_near, s, 0), inner, outer), other)


def near_scores(s: np.ndarray, inner: np.float32, outer: np.float32) -> np.ndarray:
    """Return the near polynomial of ``cap_scores`` of all scores, however large."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        k, a, b = factors_of_near(inner, outer, outer ** np.float32(0.2))
        t = s * np.float32(k)
        w = t * t + np.float32(a)
        return t * (w * w + np.float32(b))


def part_scores(s: np.ndarray, inner: np.float32, outer: np.float32) -> np.ndarray:
    """Return outer tanh(inner s) as where the near polynomial has failed: of a large cap NaN."""
    if outer > SMALL_OUTER:
        return np.full_like(s, np.nan)
    with np.errstate(over="ignore"):
        e = np.exp2(s * (inner * np.float32(2 * LOG2E)))
    return np.float32(1) / (e + np.float32(1)) * (np.float32(-2) * outer) + outer


@dataclass(frozen=True)
class Call:
    """One call of the kernel: tensors as in ``simulate_forward``, and what is derived from them."""

    config: ForwardConfig
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    options: CallOptions
    tiles: object
    redone: np.ndarray  # (1,) tiles worked on again, of all CTAs; where the config counts them

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def scale(self) -> np.float32:
        """Factor of a score, positive; within the cap, if there is one."""
        scale = abs(self.options.softmax_scale) or 1.0
        return np.float32(scale / (self.options.softcap or 1.0))

    @property
    def unit(self) -> np.float32:
        """Natural units, in which slopes are given, in those of changed scores: log2, but natural for a score_mod."""
        return np.float32(1 if self.config.natural else LOG2E)

    @property
    def changed_scale(self) -> np.float32:
        """Factor of a score, or of the tanh that caps it, in the units of changed scores."""
        return np.float32(self.options.softcap or self.scale) * self.unit

    @property
    def trusts_near(self) -> bool:
        """Whether blocks take the near polynomial unasked."""
        usual = usual_factors(self.scale, self.changed_scale)
        return bool(usual and self.changed_scale >= NEAR_OUTER)

    @property
    def scale_log2(self) -> np.float32:
        """Factor of what the softmax takes, in log2 units: a score, or a changed one."""
        if self.config.changes_scores:
            return np.float32(LOG2E if self.config.natural else 1)
        return np.float32(self.scale * LOG2E)

    def places(self, tile, rows: range):
        """(queries, heads, whether they exist) of rows of a tile."""
        place = self.tiles.place(tile)
        query, head = np.divmod(np.array(rows), self.config.pack)
        query += tile.m_block * self.config.tile_q
        head += place.group * self.config.pack
        exists = (query < place.stored_q) & (head < self.ratio)
        return query, place.head_kv * self.ratio + head, exists


class Marks:
    """What the warpgroups of a CTA tell each other about tiles that outgrew a fixed shift, as in ``fwd_ops.Tiles``.

    Attributes:
        waves: for each pass but the first, waves, modulo MARKS, of the tiles that it works on.
        outgrown: by warpgroup, the wave after its last tile that outgrew its shift.
    """

    def __init__(self):
        self.waves = {again: set() for again in range(1, PASSES + 1)}
        self.outgrown = {}


class Tiles:
    """One role's way through a worker's tiles, and through those marked again; all meet at ``barrier`` in between."""

    def __init__(self, schedule: TileSchedule, barrier, warps: int, marks: Marks, before_again):
        self._schedule, self._barrier, self._warps, self._marks = schedule, barrier, warps, marks
        self.before_again = before_again  # what is stored again must be stored last

    def first(self):
        """Return the worker's first tile."""
        return self._schedule.first()

    def ask(self, tile):
        """Nothing: which tile comes next is known."""
        return tile

    def next(self, tile):
        """Return the tile after ``tile``."""
        if self._barrier is None:
            return self._schedule.next(tile)
        schedule, again, waves = self._schedule, tile.again, self._marks.waves
        index = self._marked(schedule.next_index(tile.index), again)
        while index >= schedule.grid.total and again < PASSES:
            self.before_again()
            phase = self._barrier.phase
            self._barrier.arrive(self._warps)
            self._barrier.wait(phase)
            again = 1 if again == 0 and waves[1] else PASSES
            if waves[again]:
                index = self._marked(schedule.start, again)
        return replace(schedule.at(index), again=again)

    def _marked(self, index, again):
        """First index from ``index`` on that a pass works on."""
        schedule = self._schedule
        while again and index < schedule.grid.total:
            if schedule.wave(index) % MARKS in self._marks.waves[again]:
                break
            index = schedule.next_index(index)
        return index

    def mark(self, tile, again):
        """Have a tile worked on in a later pass."""
        self._marks.waves[again].add(self._schedule.wave(tile.index) % MARKS)

    def note_outgrown(self, tile, group):
        """Remember that a tile outgrew its shift, for the next of this warpgroup."""
        self._marks.outgrown[group] = self._schedule.wave(tile.index) + 1

    def wave(self, tile):
        """Wave of a tile."""
        return self._schedule.wave(tile.index)

    def noted(self, group):
        """Wave after the last tile of a warpgroup that outgrew its shift; -1 if none has."""
        return self._marks.outgrown.get(group, -1)

    def after_outgrown(self, tile, group):
        """1 if the warpgroup's tile before this one outgrew its shift, else 0."""
        return int(self.noted(group) == self.wave(tile))


class LoadOps:
    """Verbs of the ``load`` role."""

    def __init__(self, call: Call, rank: int):
        self._call, rows = call, call.config.cta_rows
        self._rows = range(rank * rows, (rank + 1) * rows)

    def load_q(self, tile, slot):
        """Fill a Q slot with the CTA's part of the tile's queries."""
        call = self._call
        place = call.tiles.place(tile)
        query, head, exists = call.places(tile, self._rows)
        if call.config.cu_q:
            exists &= query < call.tiles.lengths(tile)[0]
        rows = call.q[place.batch_q, place.row_q + query[exists], head[exists]]
        self._fill(slot, (len(self._rows), call.config.tile_d), exists, rows)

    def load_k(self, tile, n_block, slot):
        """Fill a K slot with block ``n_block``."""
        self._load(self._call.k, self._call.config.tile_d, tile, n_block, slot, None)

    def load_v(self, tile, n_block, slot):
        """Fill a V slot with block ``n_block``."""
        call = self._call
        seqlen_k = call.tiles.lengths(tile)[1] if call.config.v_is_ragged else None
        self._load(call.v, call.config.tile_dv, tile, n_block, slot, seqlen_k)

    def _load(self, x, width, tile, n_block, slot, seqlen_k):
        """Fill a slot; without ``seqlen_k`` with what lies in memory, behind the sequence's last key too."""
        tile_n, place = self._call.config.tile_n, self._call.tiles.place(tile)
        first = (tile.first_block + n_block) * tile_n
        end = first + tile_n if seqlen_k is None else max(min(first + tile_n, seqlen_k), first)
        rows = x[place.batch_k, place.row_k + first : place.row_k + end, place.head_kv]
        self._fill(slot, (tile_n, width), slice(len(rows)), rows)

    def _fill(self, slot, shape, where, rows):
        block = np.zeros(shape, np.float32)  # TMA fills with zeros
        block[where, : rows.shape[1]] = rows
        slot.fill(block, block.size * ELEMENT_BYTES)


class MmaOps:
    """Verbs of the ``mma`` role, for warpgroup ``group`` of those that share a tile.

    Those of one CTA share the barrier ``q_read``; ``name`` is that of the task.
    """

    worker_tiles = None  # of the role; known when its verbs are

    def __init__(self, machine: Machine, call: Call, group: int, name: str, o: Region, q_read):
        self._machine, self._call, self._config, self._group = machine, call, call.config, group
        self._name = name
        self._rows = range(group * MMA_ROWS, (group + 1) * MMA_ROWS)
        first = group % call.config.mma_warpgroups * MMA_ROWS
        self._rows_of_q = slice(first, first + MMA_ROWS)
        self._sO, self._q_read, self._queue = o, q_read, MmaQueue(machine, self._name)
        self._stores = machine.lane(f"stores of {self._name}", ordered=True)
        self._unlanded = set()  # tiles whose stores nobody has seen land
        self._p = Fragment(machine, f"P of {self._name}", (MMA_ROWS, call.config.tile_n))
        self.o_borrows_q = call.config.o_borrows_q

    def unseen_blocks(self, tile):
        """Blocks, counted from the tile's last, that this warpgroup skips."""
        return self._config.unseen_blocks(tile, self._group, self._call.tiles)

    def passed_blocks(self, tile):
        """Blocks, counted from the tile's first, that this warpgroup skips."""
        return self._config.passed_blocks(tile, self._group, self._call.tiles)

    def phases(self, tile):
        """Blocks after this warpgroup's first, which is always masked; see ``ForwardConfig.phases``."""
        if self._config.near_first:
            tile = replace(tile, again=max(tile.again, int(not self._call.trusts_near)))
        if self._config.foresees:
            again = max(tile.again, self.worker_tiles.after_outgrown(tile, self._group))
            tile = replace(tile, again=again)
        return self._config.phases(tile, self._group, self._call.tiles)

    def begin(self, tile):
        """O = 0, shift = -inf, l = 0."""
        shape = (MMA_ROWS, self._config.tile_dv)
        self._o = Fragment(self._machine, f"O of {self._name}", shape, 0.0)
        self._shift = np.full(MMA_ROWS, -np.inf, np.float32)
        self._limit, self._total = np.zeros((2, MMA_ROWS), np.float32)

    def qk(self, q_slot, k_slot):
        """Issue S = Q K^T into a fresh accumulator."""
        s = Fragment(self._machine, f"S of {self._name}", (MMA_ROWS, self._config.tile_n))
        operands = (q_slot.region, k_slot.region)
        self._queue.issue(
            s, lambda q, k: matmul(q[self._rows_of_q], k.T), operands, False, "S = Q K^T"
        )
        return s

    def pv(self, v_slot):
        """Issue O += P V."""
        self._queue.issue(self._o, matmul, (self._p.region, v_slot.region), True, "O += P V")

    def wait_mma(self, pending):
        """Wait until at most ``pending`` MMAs are in flight."""
        self._queue.wait(pending)

    def softmax_first(self, tile, n_block, s):
        """As ``softmax``, for the first block of a tile."""
        self._limit[:] = -np.inf
        self._softmax(tile, n_block, s, Phase(0, 1, True), first=True)

    def softmax(self, tile, n_block, s, phase):
        """Move the shift if it must; P = exp2(scale_log2 S - shift), l += rowsum P."""
        self._softmax(tile, n_block, s, phase, first=False)

    def _softmax(self, tile, n_block, s, phase, first):
        call, c, s = self._call, self._config, s.values
        scale = call.scale_log2
        if c.negate:
            np.negative(s, out=s)
        blocks, lengths = self._call.tiles.blocks, self._call.tiles.lengths(tile)
        keys = (tile.first_block + n_block) * c.tile_n + np.arange(c.tile_n)
        shifted = phase.fixed and not phase.masked and c.changes_scores
        if shifted and c.near_first:
            self._near_block(s)
            return
        if c.changes_scores:
            shift = self._shift if shifted else np.zeros_like(self._shift)
            ways = c.ways_to_cap(phase.masked, first)
            self._change(tile, keys, s, phase.masked, shift, ways)
        if c.score_mod or c.mask_mod:
            self._apply_mods(tile, keys, s)
        if phase.masked:
            queries = self._call.places(tile, self._rows)[0].tolist()
            begins, ends = (
                np.array([edge(query, *lengths) for query in queries])[:, None]
                for edge in (blocks.key_begin, blocks.key_end)
            )
            hidden = keys < begins
            s[hidden if phase.left_only else hidden | (keys >= ends)] = -np.inf
        top = s.max(1)
        low = first and c.near_first and tile.again == 0
        if low and call.changed_scale <= SMALL_OUTER:
            top = np.maximum(top, call.changed_scale - np.float32(ROOM_LOG2))
        outgrown = (top > self._limit) | np.signbit(self._limit)
        outgrown &= not phase.fixed
        move = np.repeat(outgrown.reshape(-1, WARP_ROWS).any(1), WARP_ROWS)
        old = self._shift
        grown = move & (top * scale > old + np.float32(c.growth_log2(tile)))
        self._shift = np.where(grown, top * scale, old)
        finite = np.where(self._shift == -np.inf, 0, self._shift)
        limit = (self._shift + c.growth_log2(tile)) / scale
        self._limit = np.where(move, limit, self._limit)
        if phase.unfixed and move.any():
            self._note_outgrown(tile)
        self._correction = np.where(move, np.exp2(old - finite), 1)
        shift = finite if phase.masked or c.may_hide_any else self._shift
        s[:] = np.exp2(s if shifted else s * scale - shift[:, None])
        self._total = self._total * self._correction + s.sum(1)

    def _near_block(self, s):
        """P by the near polynomial, and once more, part by part and warp by warp, where a thread's sum of it is large."""
        call, shift, keys = self._call, self._shift[:, None], 4 * PART_COLUMNS
        for begin in range(0, s.shape[1], keys):
            part = s[:, begin : begin + keys]
            p = np.exp2(near_scores(part, call.scale, call.changed_scale) - shift)
            large = self._is_large(p)
            large = np.repeat(large.reshape(-1, WARP_ROWS).any(1), WARP_ROWS)
            exact = part_scores(part[large], call.scale, call.changed_scale)
            p[large] = np.exp2(exact - shift[large])
            part[:] = p
            self._total = self._total + p.sum(1)
        self._correction = np.ones(len(s), np.float32)

    def _is_large(self, p):
        """Rows of which a thread's sum of P is more than P of the largest score that the near polynomial is for."""
        sums = p.reshape(len(p), -1, 4, 2).sum((1, 3))  # of the four threads of each row
        top = np.float32(np.tanh(TANH_NEAR_END)) * self._call.changed_scale
        return (sums > np.exp2(top - self._shift)[:, None]).any(1)

    def _near_is_right(self, tile):
        """Rows beside whose sum it is nothing what the near polynomial made of scores far below zero."""
        blocks = tile.n_blocks - 1 - self.unseen_blocks(tile)
        lowest = np.float32(BELOW[0] + TRUST_LOG2) - np.float32(BELOW[1]) * self._call.changed_scale
        with np.errstate(divide="ignore"):
            keys = np.log2(np.float32(blocks * self._config.tile_n))
            mean = self._shift + np.log2(self._total) - keys
        return (mean >= lowest) | (self._total == 0)

    def _change(self, tile, keys, s, masked, shift, ways):
        """S = scale S, or its cap, minus ALiBi's slope |p - j| and a shift; see ``changed_scale`` for units."""
        call, c, addend = self._call, self._config, -shift[:, None]
        if c.alibi:
            seqlen_q, seqlen_k = call.tiles.lengths(tile)
            query, head, _ = call.places(tile, self._rows)
            slopes = call.options.alibi_slopes[call.tiles.place(tile).batch]
            slope = slopes[np.minimum(head, len(slopes) - 1), None] * call.unit
            distance = query[:, None] + seqlen_k - seqlen_q - keys
            if c.causal and not masked:
                last = distance[:, -1:]
                addend = slope * (last - distance) + (addend - slope * last).astype(np.float32)
            else:
                addend = addend - slope * np.abs(distance)
            addend = addend.astype(np.float32)
        if c.softcap:
            s[:] = cap_scores(s, call.scale, call.changed_scale, ways) + addend
        else:
            s[:] = s * call.changed_scale + addend

    def _apply_mods(self, tile, keys, s):
        """S = score_mod(S), and -inf where mask_mod hides a key."""
        call, c = self._call, self._config
        place, lengths = call.tiles.place(tile), call.tiles.lengths(tile)
        query, head, _ = call.places(tile, self._rows)
        query, keys = (
            np.clip(x, 0, max(n - 1, 0)) for x, n in ((query, lengths[0]), (keys, lengths[1]))
        )
        info = SeqlenInfo(*lengths, place.row_q, place.row_k)
        head = np.minimum(head, call.q.shape[2] - 1)[:, None]
        aux = call.options.aux_tensors
        where = (place.batch, head, query[:, None], keys, info, aux)
        if c.score_mod:
            s[:] = mods.function(c.score_mod)(s, *where)
        if c.mask_mod:
            s[~np.broadcast_to(mods.function(c.mask_mod)(*where), s.shape)] = -np.inf

    def convert_p(self, s):
        """Round P to 16 bit into the operand of P V."""
        self._p.values[:] = round_to_16_bit(s.values, self._config.bf16)

    def rescale_o(self, phase):
        """Let O follow a moved shift."""
        self._o.values[:] *= self._correction[:, None]

    def store(self, tile):
        """O / l and LSE = ln 2 (shift + log2 l); a row without keys gives 0 and -inf."""
        call, place = self._call, self._call.tiles.place(tile)
        where = (place, tile.m_block)
        if where in self._unlanded:
            self._machine.report(
                f"{self._name} stores a tile again whose first store may land last"
            )
        self._unlanded.add(where)
        query, head, exists = call.places(tile, self._rows)
        unused = query >= call.tiles.lengths(tile)[0]
        empty = (self._total == 0) | unused
        shift, total, shrink = self._shift, self._total, np.float32(1)
        if call.config.sink:
            sink_log2 = call.options.sink[head % len(call.options.sink)] * np.float32(LOG2E)
            shift = np.maximum(self._shift, sink_log2)
            finite = np.where(shift == -np.inf, 0, shift)
            shrink = np.exp2(self._shift - finite)
            total = total * shrink + np.exp2(sink_log2 - finite)
        lse = np.where(unused | (total == 0), -np.inf, (shift + np.log2(total)) * np.float32(LN2))
        o = np.where(empty[:, None], 0, self._o.values * (shrink / total)[:, None])
        query = (query + place.row_q)[exists]
        call.lse[place.batch_q, head[exists], query] = lse[exists]
        if call.config.counts and tile.again and self._group == 0:
            call.redone[0] += 1
        if call.config.fixed_shift:
            self._mark(tile, exists & ~unused)
        o = round_to_16_bit(o, self._config.bf16)
        for part in range(self._config.o_parts):
            self._q_read.sync() if self.o_borrows_q else self.wait_store()
            self._store_part(o, exists, (place.batch_q, query, head[exists]), part)

    def _mark(self, tile, exists):
        """Have a tile worked on again that has a row which cannot be trusted; warp by warp, as one sees others' notes."""
        trusted = self._total <= 2.0**TRUSTED_LOG2
        if self._config.near_first:
            trusted &= self._near_is_right(tile)
        finite = np.isfinite(self._o.values).all(1)
        for first in range(0, MMA_ROWS, MMA_ROWS // 4):
            rows = np.flatnonzero(exists[first : first + MMA_ROWS // 4]) + first
            self._mark_rows(tile, trusted[rows], finite[rows])

    def _mark_rows(self, tile, trusted, finite):
        c = self._config
        wave = self.worker_tiles.wave(tile) if c.foresees else 0
        looked = tile.again > 0 or c.near_first and not self._call.trusts_near
        looked = looked or c.foresees and self.worker_tiles.noted(self._group) >= wave
        again = ~trusted & (~finite & (tile.again == 0) | (not looked))
        if again.any():
            self.worker_tiles.mark(tile, 1)
            self._note_outgrown(tile)
        if tile.again < PASSES and not finite[~again].all():
            self.worker_tiles.mark(tile, PASSES)

    def _note_outgrown(self, tile):
        if self._config.foresees:
            self.worker_tiles.note_outgrown(tile, self._group)

    def _store_part(self, o, exists, places, part):
        width = self._sO.shape[1]
        columns = slice(part * width, min((part + 1) * width, self._call.out.shape[3]))
        self._sO.write(o[:, part * width : (part + 1) * width])
        self._machine.fence()

        def land():
            stored = self._sO.peek()[exists, : max(columns.stop - columns.start, 0)]
            self._call.out[(*places, columns)] = stored

        self._stores.issue("the store of O", land, reads=[self._sO])

    def wait_store(self):
        """Wait until this warpgroup's stores have read their shared memory."""
        self._stores.join(self._stores.issued)

    def wait_landed(self):
        """Wait until this warpgroup's stores are there."""
        self.wait_store()
        self._unlanded.clear()


@dataclass(frozen=True)
class Variation:
    """What a run may change, to see whether it matters.

    Attributes:
        roles: class of the role functions.
        miscounts: (role, ring) -> slots that this role's end counts beyond the ring's.
        strict: as of ``Machine``.
        shared: class of the rings that CTAs share.
        meets: where CTAs that share tiles meet: before their roles begin, and before one ends.
        given: class of the tiles of ``load`` where they are handed out.
        told: class of those of ``mma``.
    """

    roles: type = ForwardRoles
    miscounts: dict = field(default_factory=dict)
    strict: bool = True
    shared: type = SharedRing
    meets: tuple[str, ...] = ("start", "end")
    given: type = HostGivenDense
    told: type = HostToldDense


def simulate_forward(
    config: ForwardConfig, q, k, v, options: CallOptions | float, workers=2, seed=0, variation=None
) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernel's roles on every tile of a problem.

    Args:
        config: of the kernel; its flags are part of the problem.
        q: (batch, seqlen_q, heads, head_dim), or packed, float32 holding 16-bit values.
        k: (batch, seqlen_k, heads_kv, head_dim), or packed.
        v: (batch, seqlen_k, heads_kv, head_dim_v), or packed.
        options: as the config's flags say, tensors as NumPy arrays; a number is the softmax scale of a call without.
        workers: that share the tiles: CTAs, or clusters of them.
        seed: decides whatever the schedule leaves open, and the heads per section.
        variation: a ``Variation``; the kernel itself by default.

    Returns:
        (out, lse), float32; out holds 16-bit values.

    Raises:
        Hazard: the schedule deadlocks or breaks a rule of the hardware.
    """
    out = lse = None
    for machine, call in forward_machines(config, (q, k, v), options, workers, seed, variation):
        machine.run()
        out, lse = call.out, call.lse
    return (out[0], lse[0]) if config.cu_q else (out, lse)


def forward_machines(config, tensors, options, workers, seed, variation=None):
    """Yield the machine and the call of every worker, ready to run; arguments as of ``simulate_forward``."""
    made, variation = ForwardCall.of(config, tensors, options), variation or Variation()
    grid, blocks = made.grid, made.blocks
    workers, section = min(workers, grid.total), 1 + seed % grid.head_count
    redone = np.zeros(1, np.int32)
    check_graph(config.graph, SMEM_LIMIT)
    numbers = [()] * workers
    if config.varlen:
        schedules = [VarlenSchedule(blocks, grid, made.sequences, 1 + 97 * (seed % 9))] * workers
        numbers = shared_out(schedules[0].total(), workers, seed)
    else:
        schedules = [
            TileSchedule(blocks, grid, section, worker, workers, *made.rows)
            for worker in range(workers)
        ]
    if config.handed_out:
        numbers = shared_out(grid.total, workers, seed)
    for worker, tiles in enumerate(schedules):
        call = Call(config, made.q, made.k, made.v, made.out, made.lse, made.options, tiles, redone)
        machine = Machine(seed + worker, variation.strict)
        _fill_worker(machine, call, variation, numbers[worker])
        yield machine, call


def _fill_worker(machine: Machine, call: Call, variation: Variation, numbers):
    """One CTA, which gets the tiles with these ``numbers``, or those of a cluster.

    They share rings, and meet before the first of them ends.
    """
    if call.config.cluster == 1:
        rings = _make_rings(Space(machine), call.config)
        _fill_cta(machine, call, variation, None, rings, numbers)
        return
    cluster = Cluster(machine, call.config.cluster, "start" in variation.meets)
    rings = [_make_rings(cta.smem, call.config, variation.shared) for cta in cluster.ctas]
    for connected in zip(*rings, strict=True):
        for ring in connected:
            if ring.spec.ctas > 1:
                ring.connect(connected)
    for cta, mine in zip(cluster.ctas, rings, strict=True):
        _fill_cta(machine, call, variation, cta, mine, numbers)
    if "end" in variation.meets:
        everyone = cluster.barrier("cluster", len(machine.tasks))
        for task in machine.tasks:
            task.leave = everyone.sync


def _make_rings(memory: Space, config: ForwardConfig, shared: type = SharedRing) -> list[Ring]:
    """Rings of one CTA by the config's graph; those that it shares are of class ``shared``."""
    bases = config.graph.addresses()
    shapes = {
        "q": (config.cta_rows, config.tile_d),
        "k": (config.tile_n, config.tile_d),
        "v": (config.tile_n, config.tile_dv),
    }
    made = []
    for spec in config.graph.rings:
        if not spec.tma:
            continue
        kind, readers = shared if spec.ctas > 1 else Ring, config.mma_warpgroups * spec.ctas
        at, shape = bases[spec.name], shapes[spec.name]
        made.append(kind(memory.machine, spec, readers, memory, at, shape))
    return made


def _fill_cta(
    machine: Machine, call: Call, variation: Variation, cta: Cta | None, rings: list[Ring], numbers
):
    """Barriers and roles of one CTA, by the config's graph."""
    config, schedule = call.config, variation.roles()
    count, bases, memory = (
        config.mma_warpgroups,
        config.graph.addresses(),
        rings[0].regions[0].space,
    )
    rank, spawn, prefix = 0, machine.spawn, ""
    if cta is not None:
        rank, spawn, prefix = cta.rank, cta.spawn, f"{cta.name}."
    threads = WARPGROUP * count

    def named(number, name, threads, unit):
        return NamedBarrier(machine, number, prefix + name, threads, unit, cta)

    q_read = named(BARRIER_Q_READ, "q read", threads, WARPGROUP)
    turns = [
        named(BARRIER_TURN + i, f"turn[{i}]", 2 * WARPGROUP, WARPGROUP)
        for i in range(count)
        if config.turns and count > 1
    ]

    def ends(role):
        return [End(ring, variation.miscounts.get((role, ring.spec.name), 0)) for ring in rings]

    call, tiles_of = _tiles_of_roles(machine, call, numbers, memory, named, variation)
    load, mma = plain(variation.roles.load), plain(variation.roles.mma)
    spawn("load", load, schedule, LoadOps(call, rank), tiles_of(WARP, None), *ends("load"))
    part = config.o_bytes // count
    for group in range(count):
        name = f"{prefix}mma[{group}]"
        machine.name_barrier(BARRIER_STORE + group, f"store of {name}", cta)
        at = bases["o"] + group * part
        shape = (MMA_ROWS, config.tile_dv // config.o_parts)
        o = Region(memory, f"{prefix}o[{group}]", at, at + part, shape)
        ops = MmaOps(machine, call, rank * count + group, name, o, q_read)
        tiles = ops.worker_tiles = tiles_of(WARPGROUP, ops.wait_landed)
        spawn(f"mma[{group}]", mma, schedule, ops, tiles, *ends("mma"), Turn(turns, group))


def _tiles_of_roles(machine: Machine, call: Call, numbers, memory: Space, named, variation):
    """The call as verbs see it, and what makes the tiles of a role of its threads and of how it waits for stores."""
    config, schedule, graph = call.config, call.tiles, call.config.graph
    threads = WARPGROUP * config.mma_warpgroups
    if config.varlen:
        at, total = graph.addresses()["tiles"], schedule.total()
        slots = HostSlots(machine, graph.ring("tiles"), memory, at, numbers, total)

        def of_role(mine, wait_stores):
            kind = HostGivenTiles if mine == WARP else HostToldTiles
            return kind(schedule, slots.of_role(mine // WARP, wait_stores), config.fixed_shift)

        return replace(call, tiles=of_role(WARPGROUP, None)), of_role
    if config.handed_out:
        at, total = graph.addresses()["tiles"], schedule.grid.total
        slots = HostDenseSlots(machine, graph.ring("tiles"), memory, at, numbers, total)
        notes = [-1] * config.mma_warpgroups

        def of_role(mine, wait_stores):
            kind = variation.given if mine == WARP else variation.told
            ring = slots.of_role(mine // WARP, wait_stores)
            return kind(schedule, ring, config.fixed_shift, notes)

        return call, of_role
    barrier, marks = None, Marks()
    if config.fixed_shift:
        barrier = named(BARRIER_PASS, "pass", threads + WARP, WARP)
    return call, lambda mine, wait_stores: Tiles(
        schedule, barrier, mine // WARP, marks, wait_stores or (lambda: None)
    )
