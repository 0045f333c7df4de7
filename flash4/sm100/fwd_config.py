"""Configuration of the Blackwell forward: every compile-time fact, and the graph that follows from it. DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.geometry import Phase, imax, imin
from flash4.common.launch_facts import ForwardLaunch
from flash4.sm100.fwd_graph import (
    LEADER,
    THREADS,
    TMA,
    TMEM_COLUMNS,
    UMMA,
    Buffer,
    Graph,
    Ring,
    Role,
    Signal,
    TmemMap,
)

SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA can have (227 KiB)
SMEM_ALIGN = 1_024  # the 128-byte swizzle repeats every 1,024 bytes
ELEMENT_BYTES = 2
MMA_ROWS = (
    128  # rows of one MMA, and of one Q tile: one lane of tensor memory, and one thread, each
)
BUFFERS = 2  # S in tensor memory: of two Q tiles, or of two blocks of the only one
COLUMN_STEP = 64  # columns of a 16-bit row that the 128-byte swizzle covers
KEY_STEP = 16  # keys that one MMA of P V contracts
CHUNK = 32  # columns of S that softmax converts and stores at a time
MAX_HEAD_DIM = 256  # of K and V, too: an MMA has at most 256 columns
TWO_TILES_D, TWO_TILES_DV = 192, 128  # up to which two Q tiles, and two O, have room
MAX_STAGES = 6
STAT_BYTES = 2 * BUFFERS * MMA_ROWS * 4  # per row: the factor of O, and the inverse row sum
NO_KEY = 3.4028234663852886e38  # minus the shift of a row that has seen no key: the largest float32
LARGEST_TOTAL = 2.0**64  # row sum up to which P of a fixed shift is trusted, if O is finite too
MARKS = 127  # marks of tiles to work on again: one per wave, modulo this, and one for all
MARKS_BYTES = 4 * (MARKS + 1)
SHARE_BYTES = 16  # of the tiles of sequences: first and last
KEPT = 6  # bounds of three phases, which each warp of softmax may keep in shared memory
REGISTERS = (192, 80, 48)  # softmax, correction, the others
FEATURE_REGISTERS = (
    200,
    64,
    48,
)  # windows, mods, sequences and the like keep more beside a row of S
CROWDED_REGISTERS = (200, 72, 40)  # caps, slopes or mods of sequences
WINDOW_REGISTERS = (208, 56, 40)  # windows of sequences, and sequences with packed heads
WIDE_REGISTERS = (240, 160, 96)  # of one Q tile: one warpgroup less
PAIRED_DIM_V = 128  # halves of V are one group of columns under the swizzle
PAIRED_CAUSAL = (
    8_192  # queries from which on a pair's hidden blocks cost less than it gains, by the clock
)
PAIRED_WASTE = 1.05  # rows that a pair may pad in excess of what one CTA would
WIDE_WASTE = 1.4  # the same with one Q tile, where a CTA alone waits for loads; by the clock
PACKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ForwardConfig(ForwardLaunch):
    """Compile-time facts of one Blackwell forward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and output; float16 otherwise.
        tile_d: head dim of Q and K, padded (the run-time head dim may be smaller: TMA fills with zeros).
        tile_dv: head dim of V and O, padded.
        causal: bottom-right causal mask.
        pack: query heads that share a tile's rows; a power of two, at most 64. Row ``r`` of a tile holds query
            ``r // pack`` of head ``r % pack`` of its group.
        negate: the softmax scale is negative: scores are negated before the maximum.
        ctas: CTAs that work on a tile together: 1, or a pair, whose MMAs have 256 rows. Each CTA of a pair has its own
            rows, and loads half of the keys of K and half of the columns of V.
        q_tiles: Q tiles of a CTA: two, worked on by turns, so that one's softmax runs beside the other's products; or
            one, where two O have no room, and then S(i) = Q K^T runs beside the softmax of the block before.
        tile_n: keys per block.
        stages: slots of the ring that K and V share.
        o_slots: tiles of O that wait in shared memory for their store.
        poly: exponentials of every 16 that the FMA units compute, instead of the special function unit; even.
        head: columns of P that P V may begin with, before the last ones are there.
        fixed_shift: in blocks without a mask the softmax shift stays what it is, unlooked at. A tile with a row that
            outgrew it is worked on again, at the end, with a look at every block.
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
    """

    bf16: bool
    tile_d: int
    tile_dv: int
    causal: bool
    pack: int = 1
    negate: bool = False
    ctas: int = 1
    q_tiles: int = 2
    tile_n: int = 128
    stages: int = 3
    o_slots: int = 2
    poly: int = 4
    head: int = 96
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

    def __post_init__(self):
        dims = (self.tile_d, self.tile_dv)
        if any(d <= 0 or d % COLUMN_STEP for d in dims):
            raise ValueError(f"head dims of a tile are {dims}; multiples of {COLUMN_STEP} only")
        if self.tile_n % 64 or not 64 <= self.tile_n <= 128:
            raise ValueError(f"tile_n is {self.tile_n}; supported are 64 and 128")
        if max(dims) > MAX_HEAD_DIM or self.q_tiles not in (1, 2):
            raise ValueError(
                f"head dims {dims}, q_tiles {self.q_tiles}: up to {MAX_HEAD_DIM}, and 1 or 2"
            )
        if BUFFERS * self.tile_n + self.q_tiles * self.tile_dv > TMEM_COLUMNS:
            raise ValueError(
                f"{BUFFERS} S of {self.tile_n} and {self.q_tiles} O of {self.tile_dv} columns do not fit the "
                f"{TMEM_COLUMNS} of tensor memory"
            )
        if self.stages < 2 or self.o_slots not in (1, 2):
            raise ValueError(
                f"stages is {self.stages}, o_slots {self.o_slots}: at least 2, and 1 or 2"
            )
        if self.poly % 2 or not 0 <= self.poly <= 16:
            raise ValueError(f"poly is {self.poly}; even numbers up to 16")
        if self.head % CHUNK or not 0 < self.head < self.tile_n:
            raise ValueError(f"head is {self.head}; multiples of {CHUNK} below {self.tile_n}")
        if self.pack not in PACKS:
            raise ValueError(f"pack is {self.pack}; supported are {PACKS}")
        if self.fixed_shift and not self.bf16:
            raise ValueError("fixed_shift needs bf16: P would leave the range of float16")
        if self.fixed_shift and (self.varlen or self.score_mod or self.mask_mod):
            raise ValueError(
                "fixed_shift needs sequences of one length, and no mods: each row sees a masked key"
            )
        if self.ctas not in (1, 2) or self.ctas == 2 and self.tile_dv % (2 * COLUMN_STEP):
            raise ValueError(
                f"ctas is {self.ctas}, tile_dv {self.tile_dv}: 1, or 2 where halves of V are multiples of {COLUMN_STEP}"
            )
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")

    @property
    def featured(self) -> bool:
        """Softmax has more to do than a plain mask."""
        given = (self.left, self.right, self.softcap, self.sink, self.natural, self.mask_mod)
        return any(given) or self.varlen

    @property
    def natural(self) -> bool:
        """Verbs scale scores one by one, in natural units, to add what depends on the place of query and key."""
        return self.alibi or self.score_mod != 0

    @property
    def v_is_ragged(self) -> bool:
        """Values may lie in memory behind the keys in use, where a tile's last block would read them."""
        return self.cu_k or self.used_k

    @property
    def tile_m(self) -> int:
        """Rows of a tile: one or two Q tiles of each CTA."""
        return self.q_tiles * MMA_ROWS * self.ctas

    @property
    def cluster(self) -> int:
        """CTAs that work on one tile."""
        return 1

    @property
    def handed_out(self) -> bool:
        """Tiles are handed out one by one: not here."""
        return False

    @property
    def counted(self):
        """None: there is no config that counts tiles worked on twice, since none are."""
        return None

    def part(self, q_tile, rank):
        """Which 128 rows of a tile are those of a CTA's Q tile: MMAs of a pair take one after the other."""
        return q_tile * self.ctas + rank

    def first_query(self, tile, part):
        """First query of a part; dual-mode, as the next."""
        return tile.m_block * self.tile_q + part * (MMA_ROWS // self.pack)

    def phases(self, tile, part, tiles) -> tuple[Phase, ...]:
        """Blocks of a tile as one part sees them, counted from the last.

        Those with a mask at their right come first, then those without, then those with a mask at their left. The first
        block is always masked: the keys may end in it.
        """
        blocks, lengths, count = tiles.blocks, tiles.lengths(tile), tile.n_blocks
        if not (self.left or blocks.ends_early):
            return (Phase(0, 1, True), *self._unmasked_phases(tile, 1, count))
        first_query, end, cut = self.first_query(tile, part), tile.first_block + count, 1
        if blocks.ends_early:
            cut = imax(end - blocks.unmasked(first_query, *lengths), 1)
        if not self.left:
            return (Phase(0, cut, True), *self._unmasked_phases(tile, cut, count))
        last_query, cut = first_query + MMA_ROWS // self.pack - 1, imin(cut, count)
        late = imin(imax(end - blocks.unmasked_from(last_query, *lengths), cut), count)
        unmasked = self._unmasked_phases(tile, cut, late)
        return (Phase(0, cut, True), *unmasked, Phase(late, count, True))

    def _unmasked_phases(self, tile, begin, end) -> tuple[Phase, ...]:
        """With a fixed shift the first time, if the config says so, and none the second time."""
        if not self.fixed_shift:
            return (Phase(begin, end, False),)
        cut = end - tile.again * imax(end - begin, 0)
        return (Phase(begin, cut, False, fixed=True), Phase(cut, end, False))

    @property
    def kv_columns(self) -> int:
        """Columns of a slot that holds a block of K, or one of V: those of the wider."""
        return max(self.tile_d, self.tile_dv)

    @property
    def q_bytes(self) -> int:
        """Bytes of one Q tile."""
        return MMA_ROWS * self.tile_d * ELEMENT_BYTES

    @property
    def kv_bytes(self) -> int:
        """Bytes of one slot of K or V."""
        return self.tile_n * self.kv_columns // self.ctas * ELEMENT_BYTES

    @property
    def k_bytes(self) -> int:
        """Bytes of one CTA's part of a block of K."""
        return self.tile_n * self.tile_d // self.ctas * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """Bytes of one CTA's part of a block of V."""
        return self.tile_n * self.tile_dv // self.ctas * ELEMENT_BYTES

    @property
    def o_columns(self) -> int:
        """Columns of O that are stored at a time: all of a Q tile, or a part of them if there is only one."""
        return self.tile_dv if self.q_tiles > 1 else COLUMN_STEP

    @property
    def o_parts(self) -> int:
        """Parts in which O of a CTA is stored."""
        return self.q_tiles * self.tile_dv // self.o_columns

    def place_of_part(self, part):
        """(Q tile, column in units of ``o_columns``) of a part of O."""
        return (part, 0) if self.q_tiles > 1 else (0, part)

    @property
    def o_bytes(self) -> int:
        """Bytes of a part of O."""
        return MMA_ROWS * self.o_columns * ELEMENT_BYTES

    @property
    def fits(self) -> bool:
        """Whether one CTA's shared memory holds the kernel; the buffers come first, and keep the alignment."""
        return self.graph.smem_bytes <= SMEM_LIMIT

    @property
    def rescaled(self) -> int:
        """Columns of O that correction has in its registers at a time while it rescales."""
        return {160: 32, 80: 32, 56: 8}.get(self._registers[1], 16)

    @property
    def _registers(self) -> tuple[int, int, int]:
        """Of softmax, correction and the others; ptxas spills least with these."""
        if self.q_tiles == 1:
            return WIDE_REGISTERS
        if self.varlen and (self.natural or self.softcap or self.mask_mod):
            return CROWDED_REGISTERS
        if self.varlen and (self.left or self.pack > 1):
            return WINDOW_REGISTERS
        # Beyond 128 a causal pair's look at the maximum spills three without.
        wide = self.causal and self.tile_d > PAIRED_DIM_V and self.poly > 0
        return FEATURE_REGISTERS if self.featured or wide else REGISTERS

    @property
    def graph(self) -> Graph:
        """Roles, rings, signals and memory."""
        softmax, corrections, others = self._registers
        soft = [Role(f"softmax{i}", range(4 * i, 4 * i + 4), softmax) for i in range(self.q_tiles)]
        free = 4 * self.q_tiles
        correction = Role("correction", range(free, free + 4), corrections)
        mma, load, store = (
            Role(name, range(free + i, free + i + 1), others)
            for i, name in enumerate(("mma", "load", "store"), 4)
        )
        signals = [self._signals(i, soft[i % self.q_tiles], correction, mma) for i in (0, 1)]
        if self.q_tiles == 1:
            signals = self._wide_signals(*signals)
        return Graph(
            roles=(*soft, correction, mma, load, store),
            rings=(
                Ring("q", load, mma, (TMA, UMMA), self.q_tiles, self.q_bytes),
                Ring("kv", load, mma, (TMA, UMMA), self.stages, self.kv_bytes),
                Ring("o", correction, store, (THREADS, THREADS), self.o_slots, self.o_bytes),
            ),
            signals=(*signals[0], *signals[1]),
            buffers=(
                Buffer("q", self.q_tiles * self.q_bytes),
                Buffer("kv", self.stages * self.kv_bytes),
                Buffer("o", self.o_slots * self.o_bytes),
                Buffer("stat", STAT_BYTES),
                *([Buffer("share", SHARE_BYTES)] if self.varlen else []),
                *([Buffer("kept", 4 * KEPT * 8)] if self.varlen and self.left else []),
                *([Buffer("marks", MARKS_BYTES)] if self.fixed_shift else []),
            ),
            tmem=TmemMap(self.tile_n, self.tile_dv, self.q_tiles),
            ctas=self.ctas,
        )

    def _signals(self, i: int, soft: Role, correction: Role, mma: Role) -> tuple[Signal, ...]:
        """Events of one Q tile; ``docs/kernels/sm100-fwd.md`` says why each cover holds."""
        s, p, t, o, m, last, read = (f"{name}{i}" for name in "sptomlf")
        to_mma = LEADER if self.ctas > 1 else THREADS
        return (
            Signal(s, (mma,), soft, UMMA, (p,)),
            Signal(p, (soft, correction), mma, to_mma, (s, m)),
            Signal(t, (soft,), mma, to_mma, (s,)),
            Signal(o, (mma,), correction, UMMA, (p,)),
            Signal(m, (soft,), correction, THREADS, (p, s)),
            Signal(last, (soft,), correction, THREADS, (read,)),
            Signal(read, (correction,), soft, THREADS, (last,), credit=1),
        )

    @staticmethod
    def _wide_signals(first, second):
        """Those of one Q tile: of each of two blocks s, p, t and m; o of every block, l and f of the tile."""
        of_block = [[s for s in signals if s.name[0] in "sptm"] for signals in (first, second)]
        others = {s.name: s for s in first if s.name[0] in "olf"}
        # P V of the next block, whichever its S, waits for correction, which has waited for this one's o.
        others["o0"] = replace(others["o0"], covered_by=("p0", "p1"))
        return of_block[0], (*of_block[1], *others.values())


def can_implement(problem) -> str | None:
    """Why this kernel cannot run a problem, or None if it can."""
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        if size > MAX_HEAD_DIM:
            return (
                f"{name} {size} exceeds {MAX_HEAD_DIM}: two S and one O would not fit tensor memory"
            )
    return None


def choose_config(problem) -> tuple[ForwardConfig, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    tile_d, tile_dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    q_tiles = 2 if tile_d <= TWO_TILES_D and tile_dv <= TWO_TILES_DV else 1
    if problem.varlen and tile_d > PAIRED_DIM_V:
        q_tiles = 1  # two tiles of one CTA would leave room for two slots of K and V
    pack, why_pack = choose_pack(problem, q_tiles)
    if q_tiles > 1:
        ctas, why_ctas = choose_ctas(problem, tile_d, tile_dv, pack)
    else:
        tile_dv = -(-tile_dv // PAIRED_DIM_V) * PAIRED_DIM_V  # so that its halves suit a pair
        ctas, why_ctas = choose_wide_ctas(problem, pack)
    fields = {
        "bf16": problem.dtype == torch.bfloat16,
        "tile_d": tile_d,
        "tile_dv": tile_dv,
        "causal": problem.causal,
        "pack": pack,
        "negate": problem.negative_scale,
        "ctas": ctas,
        "q_tiles": q_tiles,
        "left": problem.window_left,
        "right": problem.window_right,
        "softcap": problem.softcap,
        "sink": problem.sink,
        "alibi": problem.alibi,
        "score_mod": problem.score_mod,
        "mask_mod": problem.mask_mod,
        "aux": problem.aux,
        "cu_q": problem.cu_q,
        "cu_k": problem.cu_k,
        "used_q": problem.used_q,
        "used_k": problem.used_k,
    }
    fields["fixed_shift"], why_shift = choose_shift(fields)
    config, why_memory = spend_memory(fields)
    share = (
        f"{config.poly} of 16 exponentials on the FMA units: the special function unit is the limit"
    )
    return config, (why_ctas, why_memory, why_shift, share, why_pack)


class SM103:
    """What compute capability 10.3 gets, whose special function unit is twice as fast: no polynomials."""

    can_implement = staticmethod(can_implement)

    @staticmethod
    def choose_config(problem) -> tuple[ForwardConfig, tuple[str, ...]]:
        """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
        config, reasons = choose_config(problem)
        share = "all exponentials on the special function unit, which has twice the rate of 10.0"
        reasons = [share if "exponentials" in reason else reason for reason in reasons]
        return replace(config, poly=0), tuple(reasons)


def choose_shift(fields: dict) -> tuple[bool, str]:
    """Whether the softmax shift is fixed in blocks without a mask, and the reason."""
    if not fields["bf16"]:
        return False, "the softmax shift follows the maximum: P would leave the range of float16"
    lengths = ("cu_q", "cu_k", "used_q", "used_k")
    special = ("left", "right", "softcap", "sink", "alibi", "score_mod", "mask_mod", *lengths)
    if any(fields[name] for name in special):
        return False, "the softmax shift follows the maximum, as with all but plain masks"
    why = "a fixed softmax shift in blocks without a mask; what outgrows it is done again"
    return True, why


def choose_ctas(problem, tile_d: int, tile_dv: int, pack: int) -> tuple[int, str]:
    """CTAs that work on a tile together, and the reason."""
    if tile_dv != PAIRED_DIM_V or tile_d < PAIRED_DIM_V:
        return 1, "one CTA per tile: halves of a block of K and V would be too narrow"
    if problem.window_left or problem.window_right:
        return (
            1,
            "one CTA per tile: in a window a pair's tile of twice the rows visits hidden blocks",
        )
    if problem.causal and tile_d == PAIRED_DIM_V and problem.seqlen_q < PAIRED_CAUSAL:
        return (
            1,
            f"one CTA per tile: below {PAIRED_CAUSAL} queries a pair's hidden blocks cost more",
        )
    if problem.varlen:
        return 1, "one CTA per tile: sequences may be shorter than a pair's rows"
    return pair_if_filled(problem.seqlen_q * pack, 2 * MMA_ROWS)


def choose_wide_ctas(problem, pack: int) -> tuple[int, str]:
    """CTAs that work on a tile together, if each has one Q tile only: then one alone waits for loads."""
    if problem.varlen:
        return 2, "a pair of CTAs per tile: each loads and reads half of K and V"
    return pair_if_filled(problem.seqlen_q * pack, MMA_ROWS, WIDE_WASTE)


def pair_if_filled(rows: int, tile: int, waste: float = PAIRED_WASTE) -> tuple[int, str]:
    """Two CTAs, unless that pads the rows of a tile by much more."""
    padded, paired = (-(-rows // n) * n for n in (tile, 2 * tile))
    if paired > padded * waste:
        return 1, f"one CTA per tile: a pair would work on {paired} rows where there are {rows}"
    return 2, "a pair of CTAs per tile: each loads and reads half of K and V"


def padded_head_dim(head_dim: int) -> int:
    """Head dim of the tile."""
    return -(-head_dim // COLUMN_STEP) * COLUMN_STEP


def spend_memory(fields: dict) -> tuple[ForwardConfig, str]:
    """Config with as many KV slots as there is room for, from 2 to 6, and two of O if there is; and the reason."""
    wide = fields["q_tiles"] == 1
    if wide and fields["ctas"] == 1:  # four slots of 64 keys, and not two of 128
        fields = {**fields, "tile_n": 64, "head": 32}
    for o_slots, least in ((2, 2 if wide else 3), (1, 2)):
        for stages in range(MAX_STAGES, least - 1, -1):
            config = ForwardConfig(**fields, o_slots=o_slots, stages=stages)
            if config.fits:
                return (
                    config,
                    f"{stages} slots of K and V, {o_slots} of O: what shared memory holds",
                )
    raise ValueError(f"two blocks of K and V do not fit beside Q and O: {fields}")


def choose_pack(problem, q_tiles: int) -> tuple[int, str]:
    """Query heads per tile, and the reason: all that share a KV head, or one."""
    ratio, rows = problem.gqa_ratio, q_tiles * MMA_ROWS
    if ratio == 1:
        return 1, "one query head per KV head: nothing to pack"
    if problem.pack_gqa is False:
        return 1, "the caller wants heads unpacked"
    if problem.cu_q and ratio not in PACKS:
        return 1, "packed queries: the loads know no bound for the heads of a group"
    all_heads = next((p for p in PACKS if p >= ratio), PACKS[-1])
    candidates = (all_heads,) if problem.pack_gqa else (1, all_heads)

    def tiles(pack):
        return -(-ratio // pack) * -(-problem.seqlen_q * pack // rows)

    pack = min(candidates, key=lambda p: (tiles(p), p))
    return (
        pack,
        f"{pack} of {ratio} query heads per tile: {tiles(pack)} tiles per KV head, {tiles(1)} unpacked",
    )
