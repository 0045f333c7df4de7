"""Configuration and pipeline graph of the Hopper forward: every compile-time fact, DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.geometry import Phase, ceil_div, choose, imax, imin
from flash4.common.graph import Buffer, PipelineGraph, Ring, Role
from flash4.common.launch_facts import ForwardLaunch
from flash4.common.tiles import grid_of

SMEM_LIMIT = 232_448  # bytes of shared memory that one sm_90 CTA can have (227 KiB)
SMEM_ALIGN = 1_024  # the 128-byte swizzle repeats every 1,024 bytes
ELEMENT_BYTES = 2
MMA_ROWS = 64  # rows of one warpgroup's WGMMA
TILE_DIM_STEP = 16  # head dims are padded in shared memory to a multiple of this
WIDE_TILE_DIM_STEP = 32  # those above 128 to a multiple of this
O_COLUMN_STEP = 64  # columns of O that one box of a TMA store holds
TRUSTED_LOG2 = 64  # P of a fixed shift is trusted up to a row sum of 2 to this, if O is finite too
# Marks of tiles to work on again, for each of two passes: one per wave, modulo MARKS, and one for all. Behind them, for
# each warpgroup, the wave after the last one whose tile outgrew its shift.
MARKS, PASSES = 127, 2
OUTGROWN = PASSES * (MARKS + 1)
NOTES = 4  # the latter; where tiles are handed out they lie behind the slots
MARK_WORDS = OUTGROWN + NOTES
MARKS_BYTES = 4 * MARK_WORDS
GROWTH_LOG2 = 8  # see ForwardConfig.growth_log2
KEY_STEP = 16  # keys that one WGMMA of P V contracts
MAX_HEAD_DIM = 256
SHARED_KEYS = 1_024  # fewest keys of tiles that CTAs share
SHARED_TILES = 132  # fewest such tiles: two for each pair of an H100's multiprocessors
TILE_SLOTS = 4  # of the ring of tiles, where they are handed out
TILE_WORDS = 17  # of a slot, 4 bytes each: an ``Entry``, then one for each pass
DENSE_WORDS = 5  # the same, where all sequences are of one length: a ``DenseEntry``
# Registers per thread of ``mma`` and of ``load``, by warpgroups of ``mma``. ``load`` needs more to find tiles of
# sequences and to copy wide blocks, which come in more boxes of 64 or 32 columns, most for the seven of head dim 224.
REGISTERS = {1: (256, 56), 2: (240, 24), 3: (160, 32), 4: (112, 24)}
MORE_TO_LOAD = {1: (256, 56), 2: (232, 40), 3: (152, 56), 4: (112, 32)}
SEVEN_BOXES = (224, 56)
PACKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ForwardConfig(ForwardLaunch):
    """Compile-time facts of one Hopper forward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and output; float16 otherwise.
        tile_d: head dim of Q and K, padded (the run-time head dim may be smaller: TMA fills with zeros).
        tile_dv: head dim of V and O, padded.
        tile_m: rows per tile, 64 for each MMA warpgroup.
        tile_n: keys per block.
        causal: bottom-right causal mask.
        pack: query heads that share a tile's rows; a power of two, at most 64. Row ``r`` of a tile holds query
            ``r // pack`` of head ``r % pack`` of its group.
        negate: the softmax scale is negative: scores are negated before the maximum.
        stages: slots of the K ring and of the V ring.
        q_stages: slots of Q: with two, the next tile's Q is on its way while this one is worked on.
        o_parts: O is stored in so many parts, by columns, one after the other through the same shared memory.
        turns: warpgroups take turns at issuing MMAs.
        cluster: CTAs that work on one tile, each on its part of the rows. Each loads its part of every block of K and V
            and multicasts it to all of them.
        handed_out: whoever is free takes the next tile, from a counter; otherwise each worker has its tiles beforehand.
            Sequences of different lengths are always handed out, in a way of their own.
        skip: a warpgroup passes over the blocks that none of its own 64 rows sees (causal, blocks shorter than the
            tile). Warpgroups then run different numbers of blocks, which taking turns forbids.
        settle: exponentials (of 64) that must be computed before the wait for P V; steers ptxas.
        fixed_shift: in blocks without a mask the softmax shift stays what it is, unlooked at. A tile with a row that
            outgrew it is worked on again, at the end, with a look at every block; so is, at once, the next tile of the same
            warpgroup.
        left: a window limits the keys before a query's own position; its side is a run-time value.
        right: a window limits the keys after it, and lets some through (none is ``causal``).
        softcap: scores are capped: cap * tanh(scale * score / cap), with the cap a run-time value.
        sink: each query head has a logit that adds to the denominator only.
        alibi: scores lose a slope of their head times the distance between query and key.
        score_mod: key of the callable that changes scores (``common.mods``); 0 is none.
        mask_mod: key of the callable that hides keys; 0 is none.
        aux: types of the tensors that those read (``encode_aux``).
        cu_q: queries of all sequences are packed, (total, heads, head_dim); cumulative lengths say where each begins.
        cu_k: the same of keys and values.
        used_q: not all stored queries of a sequence are in use; the others give 0.
        used_k: not all stored keys of a sequence are in use; the others are never seen.
        counts: tiles that are worked on again are counted in a tensor; for tests and benchmarks.
    """

    bf16: bool
    tile_d: int
    tile_dv: int
    tile_m: int
    tile_n: int
    causal: bool
    pack: int = 1
    negate: bool = False
    stages: int = 2
    turns: bool = False
    skip: bool = False
    settle: int = 12
    q_stages: int = 1
    o_parts: int = 1
    fixed_shift: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    sink: bool = False
    alibi: bool = False
    score_mod: int = 0
    mask_mod: int = 0
    aux: int = 0
    cu_q: bool = False
    cu_k: bool = False
    used_q: bool = False
    used_k: bool = False
    counts: bool = False
    cluster: int = 1
    handed_out: bool = False

    def __post_init__(self):
        if self.tile_m % MMA_ROWS or not 1 <= self.tile_warpgroups <= 4 * self.cluster:
            raise ValueError(
                f"tile_m is {self.tile_m}; supported are 64, 128, 192 and 256 for each CTA"
            )
        if self.cluster not in (1, 2) or self.tile_m % (MMA_ROWS * self.cluster):
            raise ValueError(
                f"cluster is {self.cluster} with tile_m {self.tile_m}; supported are 1, and 2 for multiples of 128"
            )
        if self.tile_n % KEY_STEP or self.tile_n <= 0:
            raise ValueError(f"tile_n is {self.tile_n}; supported are multiples of {KEY_STEP}")
        if min(self.stages, self.q_stages) < 1:
            raise ValueError(
                f"stages is {self.stages}, q_stages {self.q_stages}; a ring needs at least 1"
            )
        if self.o_parts < 1 or self.tile_dv % (self.o_parts * O_COLUMN_STEP) and self.o_parts > 1:
            raise ValueError(
                f"o_parts is {self.o_parts}; parts of {self.tile_dv} columns are multiples of {O_COLUMN_STEP}"
            )
        if self.pack not in PACKS:
            raise ValueError(f"pack is {self.pack}; supported are {PACKS}")
        if self.fixed_shift and not self.bf16:
            raise ValueError("fixed_shift needs bf16: P would leave the range of float16")
        if self.fixed_shift and self.may_hide_any:
            raise ValueError("fixed_shift needs no mods: each row sees a masked key")
        if self.cluster > 1 and (self.fixed_shift or self.varlen):
            raise ValueError(
                "cluster needs sequences of one length, and no fixed_shift: marks and tiles are of one CTA"
            )
        if self.handed_out and (self.varlen or self.cluster > 1):
            raise ValueError(
                "handed_out needs sequences of one length and cluster=1: others are handed out in another way, or not"
            )
        if self.counts and not self.fixed_shift:
            raise ValueError("counts needs fixed_shift: without it no tile is worked on again")
        if self.o_parts > 1 and self.o_borrows_q:
            raise ValueError(f"o_parts is {self.o_parts}; 1 is supported where O borrows Q")
        if not 0 <= self.settle <= 64:
            raise ValueError(f"settle is {self.settle}; supported are 0 to 64")
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")
        if self.skip and (self.turns or not (self.causal or self.right)):
            raise ValueError(
                "skip needs causal or right, and turns=False: warpgroups run different numbers of blocks"
            )

    @property
    def mma_warpgroups(self) -> int:
        """Warpgroups of the ``mma`` role of one CTA."""
        return self.tile_warpgroups // self.cluster

    @property
    def ctas(self) -> int:
        """CTAs that work on a tile together, as configs of all architectures call them."""
        return self.cluster

    @property
    def tile_warpgroups(self) -> int:
        """Warpgroups that share a tile."""
        return self.tile_m // MMA_ROWS

    @property
    def cta_rows(self) -> int:
        """Rows of a tile that one CTA works on."""
        return self.tile_m // self.cluster

    @property
    def hands_out(self) -> bool:
        """``load`` tells the other roles which tile comes next."""
        return self.varlen or self.handed_out

    @property
    def natural(self) -> bool:
        """Verbs scale scores one by one, in natural units: a mod takes them so."""
        return self.score_mod != 0

    @property
    def changes_scores(self) -> bool:
        """Verbs scale scores one by one, unless natural in log2 units, since they change them on the way."""
        return self.softcap or self.alibi or self.natural

    def ways_to_cap(self, masked: bool, first: bool = False) -> int:
        """Ways to cap scores, of ``fwd_cap.Cap``: all 3, or the first and the last, or the last alone.

        Blocks with a mask are few, and without a fixed shift so are registers: one way more spills. Beside P of a part
        only a tile's first block has two.
        """
        if self.alibi and not self.fixed_shift or self.near_first and masked and not first:
            return 1
        return 2 if masked or self.mma_warpgroups > 2 and not self.fixed_shift else 3

    @property
    def near_first(self) -> bool:
        """Caps with a near polynomial take it unasked in blocks with a fixed shift and no mask; see ``fwd_cap``.

        Not with slopes, as the limit by which it is judged would move with each key, and not for wide heads, whose O
        leaves no registers for it.
        """
        narrow = max(self.tile_d, self.tile_dv) <= 128
        return self.softcap and self.fixed_shift and narrow and not self.alibi

    @property
    def may_hide_any(self) -> bool:
        """A score may become -inf in any block, not in those alone that a mask cuts."""
        return self.score_mod != 0 or self.mask_mod != 0

    @property
    def v_is_ragged(self) -> bool:
        """Values may lie in memory behind the keys in use, where a tile's last block would read them."""
        return self.cu_k or self.used_k

    @property
    def counted(self):
        """The config that counts the tiles that this one works on again; None if there are never any."""
        return replace(self, counts=True) if self.fixed_shift else None

    @property
    def foresees(self) -> bool:
        """A tile after one that outgrew a fixed shift is worked on without, as it gets the same bits either way."""
        return self.fixed_shift and not (self.changes_scores or self.varlen)

    def growth_log2(self, tile):
        """How far P may grow before its row's shift moves: up to 2^8, which is far from the limits of float16.

        Beside a fixed shift as far as that is trusted, so that what did not outgrow it has the same bits either way.
        Where O overflows at that, the last pass goes back to 2^8.
        """
        if not self.fixed_shift:
            return GROWTH_LOG2
        return choose(tile.again == PASSES, GROWTH_LOG2, TRUSTED_LOG2)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Numbers that the launch takes, in order; ``cap_root`` is the fifth root of the cap."""
        return (*super().numbers, *(("cap_root",) if self.softcap else ()))

    @property
    def counters(self) -> dict[str, bool]:
        """Which counters the kernel takes, by name."""
        return {
            "next_tile": self.varlen,
            "reset_counter": self.handed_out,
            "redone": self.counts,
        }

    def first_query(self, tile, warpgroup):
        """First query of a warpgroup's rows; dual-mode, as the next two."""
        return tile.m_block * self.tile_q + warpgroup * (MMA_ROWS // self.pack)

    def unseen_blocks(self, tile, warpgroup, tiles):
        """Blocks, counted from the tile's last, that the warpgroup skips: none of its rows sees them."""
        if not self.skip:
            return 0
        last_query = self.first_query(tile, warpgroup) + MMA_ROWS // self.pack - 1
        end = tile.first_block + tile.n_blocks
        unseen = end - tiles.blocks.until(last_query, *tiles.lengths(tile))
        if self.varlen:  # a tile without queries in use visits one block, whatever they would see
            unseen = imin(imax(unseen, 0), tile.n_blocks - 1)
        return unseen

    def passed_blocks(self, tile, warpgroup, tiles):
        """Blocks, counted from the tile's first, that the warpgroup skips: none of its rows sees them any more."""
        if not (self.skip and self.left):
            return 0
        query = self.first_query(tile, warpgroup)
        passed = tiles.blocks.of_query(query, *tiles.lengths(tile)) - tile.first_block
        unseen = self.unseen_blocks(tile, warpgroup, tiles)
        return imin(imax(passed, 0), tile.n_blocks - 1 - unseen)

    def phases(self, tile, warpgroup, tiles) -> tuple[Phase, ...]:
        """Blocks after the warpgroup's first (which is always masked).

        Those with a mask at their right come first, then those without, then those with a mask at their left. Those
        without have a fixed shift the first time, if the config says so, and none the second time.
        """
        blocks, lengths = tiles.blocks, tiles.lengths(tile)
        begin = self.unseen_blocks(tile, warpgroup, tiles) + 1
        if not (self.left or blocks.ends_early):
            return self._later_phases(tile, begin, tile.n_blocks, masked=False)
        end, found = tile.first_block + tile.n_blocks, []
        last_block = tile.n_blocks - self.passed_blocks(tile, warpgroup, tiles)
        if blocks.ends_early:
            query = self.first_query(tile, warpgroup if self.skip else 0)
            cut = imax(end - blocks.unmasked(query, *lengths), begin)
            if self.left:
                cut = imin(cut, last_block)
            found.append(Phase(begin, cut, True))
            begin = cut
        if not self.left:
            return (*found, *self._later_phases(tile, begin, tile.n_blocks, masked=False))
        last = warpgroup if self.skip else self.tile_warpgroups - 1
        query = self.first_query(tile, last) + MMA_ROWS // self.pack - 1
        cut = imin(imax(end - blocks.unmasked_from(query, *lengths), begin), last_block)
        unmasked = self._later_phases(tile, begin, cut, masked=False)
        return (*found, *unmasked, *self._later_phases(tile, cut, last_block, masked=True))

    def _later_phases(self, tile, begin, end, masked) -> tuple[Phase, ...]:
        """Blocks that come when every row has seen a key, whose shift may be fixed; a mask cuts them at the left alone."""
        if not self.fixed_shift:
            return (Phase(begin, end, masked, left_only=masked),)
        cut = end - imin(tile.again, 1) * imax(end - begin, 0)
        return (
            Phase(begin, cut, masked, fixed=True, left_only=masked),
            Phase(cut, end, masked, unfixed=True, left_only=masked),
        )

    @property
    def q_bytes(self) -> int:
        """Bytes of a CTA's rows of a Q tile."""
        return self.cta_rows * self.tile_d * ELEMENT_BYTES

    @property
    def k_bytes(self) -> int:
        """Bytes of one K block."""
        return self.tile_n * self.tile_d * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """Bytes of one V block."""
        return self.tile_n * self.tile_dv * ELEMENT_BYTES

    @property
    def o_bytes(self) -> int:
        """Bytes of one part of a CTA's rows of an O tile."""
        return self.cta_rows * self.tile_dv // self.o_parts * ELEMENT_BYTES

    @property
    def o_borrows_q(self) -> bool:
        """O is staged for its store in the memory of Q, where there is no room for both."""
        if self.q_stages > 1:
            return False
        own = self.q_bytes + self.o_bytes + self.stages * (self.k_bytes + self.v_bytes)
        return own + SMEM_ALIGN > SMEM_LIMIT

    @property
    def fits(self) -> bool:
        """Whether one CTA's shared memory holds the kernel."""
        return self.graph.smem_bytes + SMEM_ALIGN <= SMEM_LIMIT

    @property
    def _registers(self) -> tuple[int, int]:
        """Registers per thread of ``mma`` and ``load``."""
        dims = (self.tile_d, self.tile_dv)
        if 224 in dims and self.mma_warpgroups == 2 and not self.varlen:
            return SEVEN_BOXES
        much_to_load = self.varlen or (max(dims) > 128 and self.handed_out)
        return (MORE_TO_LOAD if much_to_load else REGISTERS)[self.mma_warpgroups]

    @property
    def graph(self) -> PipelineGraph:
        """Roles, rings and shared memory.

        load --[q x2 tma->warps]--> mma
        load --[k x2 tma->warps]--> mma
        load --[v x2 tma->warps]--> mma
        load --[tiles x4 warp->warps]--> mma  (tiles that are handed out)
        """
        groups = self.mma_warpgroups
        mma_regs, load_regs = self._registers
        load = Role("load", range(0, 1), 1, load_regs)
        mma = Role("mma", range(1, 1 + groups), 4 * groups, mma_regs)
        buffers = [
            Buffer("q", self.q_stages * self.q_bytes),
            Buffer("k", self.stages * self.k_bytes),
            Buffer("v", self.stages * self.v_bytes),
            Buffer("o", self.o_bytes, borrows="q" if self.o_borrows_q else None),
        ]
        rings = [
            Ring("q", load, mma, self.q_stages, self.q_bytes),
            Ring("k", load, mma, self.stages, self.k_bytes, self.cluster),
            Ring("v", load, mma, self.stages, self.v_bytes, self.cluster),
        ]
        if self.varlen:
            rings.append(Ring("tiles", load, mma, TILE_SLOTS, 4 * TILE_WORDS, tma=False))
            buffers.append(Buffer("tiles", TILE_SLOTS * 4 * TILE_WORDS))
        elif self.handed_out:
            rings.append(Ring("tiles", load, mma, TILE_SLOTS, 4 * DENSE_WORDS, tma=False))
            buffers.append(Buffer("tiles", 4 * (TILE_SLOTS * DENSE_WORDS + NOTES)))
        elif self.fixed_shift:
            buffers.append(Buffer("marks", MARKS_BYTES))
        return PipelineGraph(roles=(load, mma), rings=tuple(rings), buffers=tuple(buffers))


def can_implement(problem) -> str | None:
    """Why this kernel cannot run a problem, or None if it can."""
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"{name} {size} exceeds {MAX_HEAD_DIM}: a tile's accumulators would not fit the registers"
    return None


def choose_config(problem) -> tuple[ForwardConfig, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    tile_d, tile_dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    tile, why_tile = choose_tile(tile_d, tile_dv, problem)
    pack, why_pack = choose_pack(problem, tile["tile_m"])
    config = ForwardConfig(
        bf16=problem.dtype == torch.bfloat16,
        tile_d=tile_d,
        tile_dv=tile_dv,
        causal=problem.causal,
        pack=pack,
        negate=problem.negative_scale,
        left=problem.window_left,
        right=problem.window_right,
        softcap=problem.softcap,
        sink=problem.sink,
        alibi=problem.alibi,
        score_mod=problem.score_mod,
        mask_mod=problem.mask_mod,
        aux=problem.aux,
        cu_q=problem.cu_q,
        cu_k=problem.cu_k,
        used_q=problem.used_q,
        used_k=problem.used_k,
        **tile,
    )
    config, why_shift = choose_shift(config)
    config, why_memory = spend_memory(config)
    config, why_share = share_tiles(config, problem)
    config, why_order = order_tiles(config)
    return config, (why_tile, why_shift, why_memory, why_share, why_order, why_pack)


def choose_shift(config: ForwardConfig) -> tuple[ForwardConfig, str]:
    """Fix the softmax shift where that is faster and the range of P allows it; and the reason."""
    obstacle = shift_obstacle(config, config.bf16)
    if max(config.tile_d, config.tile_dv) > 128 and not 128 < config.tile_dv < 256:
        obstacle = obstacle or "the products take the time"
    if obstacle is not None:
        return config, f"the softmax shift follows the maximum: {obstacle}"
    why = "a fixed softmax shift in blocks without a mask; what outgrows it is done again"
    return replace(config, fixed_shift=True), why


def shift_obstacle(facts, bf16: bool) -> str | None:
    """Why the softmax shift of a problem, or of its config, cannot be fixed or had better not be; None if it may."""
    if not bf16:
        return "P would leave the range of float16"
    if facts.score_mod or facts.mask_mod:
        return "a mod may hide all keys that a row has seen so far"
    if facts.alibi and not facts.causal:
        return "the first blocks are the farthest"
    return None


def spend_memory(config: ForwardConfig) -> tuple[ForwardConfig, str]:
    """Give Q a second slot if there is room, or else O memory of its own, in parts if it must be; and the reason.

    Both let the next tile's Q come in while this tile is finished.
    """
    changes = [
        ({"q_stages": 2}, "two slots of Q: room for the next tile's"),
        ({}, "one slot of Q: no room for a second"),
    ]
    if config.tile_dv % (2 * O_COLUMN_STEP) == 0:
        changes.append(({"o_parts": 2}, "O is stored in two halves: no room for all of it"))
    for change, why in changes:
        changed = replace(config, **change)
        if changed.fits and not changed.o_borrows_q:
            return changed, why
    return config, "O borrows the memory of Q: no room for both"


def share_tiles(config: ForwardConfig, problem) -> tuple[ForwardConfig, str]:
    """Let two CTAs share tiles of twice the rows, and halve the reads of K and V, where that is faster; and the reason.

    It was measured with many keys and many tiles, and gains little: nothing else may get worse for it.
    """
    tiles = grid_of(problem, 2 * config.tile_q, config.pack).total
    obstacles = {
        "head dims up to 128 gain nothing from sharing": max(config.tile_d, config.tile_dv) <= 128,
        "what outgrows a fixed shift is found out by one CTA": config.fixed_shift,
        "sequences of different lengths are shared out by one CTA": config.varlen,
        "tiles that a mask cuts gain more from being handed out": config.causal or config.right,
        "few blocks of a left window are of use to twice the rows": config.left,
        "mods": config.may_hide_any,
        f"fewer than {SHARED_KEYS} keys": problem.seqlen_k < SHARED_KEYS,
        f"fewer than {SHARED_TILES} tiles of twice the rows": tiles < SHARED_TILES,
        "half of the last tile of twice the rows would be empty": (
            ceil_div(problem.seqlen_q, config.tile_q) % 2 == 1
        ),
    }
    for obstacle, present in obstacles.items():
        if present:
            return config, f"one CTA to a tile: {obstacle}"
    why = f"two CTAs to a tile, each loads half of K and V: at least {SHARED_KEYS} keys, {SHARED_TILES} tiles"
    return replace(config, cluster=2, tile_m=2 * config.tile_m), why


def order_tiles(config: ForwardConfig) -> tuple[ForwardConfig, str]:
    """Hand tiles out where they differ in length; and the reason."""
    if config.varlen:
        return config, "tiles are handed out: lengths are known on the GPU only"
    if not (config.causal or config.left or config.right):
        return config, "tiles in a fixed order: all take equally long"
    why = "tiles are handed out, the longest of a section first: whoever is free takes the next"
    return replace(config, handed_out=True), why


def padded_head_dim(head_dim: int) -> int:
    """Head dim of the tile: at least 64, then in steps that keep the number of kernels small."""
    step = TILE_DIM_STEP if head_dim <= 128 else WIDE_TILE_DIM_STEP
    return max(64, -(-head_dim // step) * step)


def choose_tile(tile_d: int, tile_dv: int, problem) -> tuple[dict, str]:
    """Return the config fields that shape a tile and its loop, and the reason; measured in bench/NOTES.md.

    S and P of a block and O of a tile share a thread's registers, hence fewer keys per block for a wider V.
    """
    import torch

    wide, cut = max(tile_d, tile_dv), problem.causal or problem.window_right
    may_fix = shift_obstacle(problem, problem.dtype == torch.bfloat16) is None
    mods = problem.score_mod or problem.mask_mod
    if problem.softcap and may_fix and not problem.alibi and wide <= 128:
        return _tile_of_near_cap(wide, cut, problem.window_left or problem.varlen)
    # Four warpgroups have few registers: one of these at a time.
    crowded = problem.softcap + problem.alibi + problem.window_left > 1
    if wide == 64 and not (mods or crowded):
        tile = {"tile_m": 256, "tile_n": 64, "stages": 4, "skip": cut}
        if may_fix:
            return {**tile, "settle": 8}, "head dims up to 64: four warpgroups, short blocks"
        why = "head dims up to 64: four warpgroups, short blocks; the maximum is looked at"
        return {**tile, "settle": 0, "turns": not cut}, why
    if may_fix:
        why = "short blocks: of few is any part behind a mask"
        if wide <= 96:
            return {"tile_m": 192, "tile_n": 64, "stages": 3, "settle": 12, "skip": cut}, why
        if wide <= 128:
            return {"tile_m": 128, "tile_n": 64, "stages": 4, "settle": 0, "skip": cut}, why
        if tile_dv > 128:
            return {"tile_m": 128, "tile_n": 64, "stages": 2, "settle": 16, "skip": cut}, why
    by_registers = {160: 112, 192: 112, 224: 80, 256: 64}.get(tile_dv, 128)
    if problem.aux:  # loads that mods make for each score are all in flight at once
        by_registers = {160: 64, 192: 48, 224: 48, 256: 32}.get(tile_dv, 64)
    tile = {"tile_m": 128, "tile_n": by_registers, "stages": 2, "settle": 12}
    while not ForwardConfig(True, tile_d, tile_dv, causal=False, **tile).fits:
        tile["tile_n"] -= KEY_STEP
    limit = "registers" if tile["tile_n"] == by_registers else "shared memory"
    dims = f"head dims {tile_d}/{tile_dv}"
    return tile, f"{tile['tile_n']} keys per block: what {limit} can hold beside {dims}"


def _tile_of_near_cap(wide, cut, short) -> tuple[dict, str]:
    """As ``choose_tile``, of caps whose near polynomial is taken unasked: P of a part needs registers beside S."""
    if wide <= 96:
        why = "capped scores: three warpgroups, as four have no registers to judge them"
        return {"tile_m": 192, "tile_n": 64, "stages": 3, "settle": 12, "skip": cut}, why
    if short:
        why = "capped scores: short blocks, beside a left window or what finds sequences"
        return {"tile_m": 128, "tile_n": 64, "stages": 4, "settle": 12, "skip": cut}, why
    why = "capped scores: 128 keys per block, judged in two parts"
    return {"tile_m": 128, "tile_n": 128, "stages": 2, "settle": 12}, why


def choose_pack(problem, tile_m: int) -> tuple[int, str]:
    """Query heads per tile, and the reason: all that share a KV head, or one.

    Nothing between: the choice depends on the number of queries, and each is a kernel to compile.
    """
    ratio = problem.gqa_ratio
    if ratio == 1:
        return 1, "one query head per KV head: nothing to pack"
    if problem.pack_gqa is False:
        return 1, "the caller wants heads unpacked"
    if problem.cu_q and ratio not in PACKS:
        return 1, "packed queries: the loads know no bound for the heads of a group"
    all_heads = next((p for p in PACKS if p >= ratio), PACKS[-1])
    candidates = (all_heads,) if problem.pack_gqa else (1, all_heads)

    def tiles(pack):
        return -(-ratio // pack) * -(-problem.seqlen_q * pack // tile_m)

    pack = min(candidates, key=lambda p: (tiles(p), p))
    return (
        pack,
        f"{pack} of {ratio} query heads per tile: {tiles(pack)} tiles per KV head, {tiles(1)} unpacked",
    )
