"""Configuration of the Blackwell forward: every compile-time fact, and the graph that follows from it. DSL-free."""

from dataclasses import dataclass

from flash4.common.geometry import KvBlocks, Phase, imax
from flash4.sm100.fwd_graph import (
    THREADS,
    TMA,
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
Q_TILES = 2  # worked on in turns: one's softmax runs beside the other's products
COLUMN_STEP = 64  # columns of a 16-bit row that the 128-byte swizzle covers
KEY_STEP = 16  # keys that one MMA of P V contracts
CHUNK = 32  # columns of S that softmax converts and stores at a time
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 192, 128
MAX_STAGES = 6
STAT_BYTES = 2 * Q_TILES * MMA_ROWS * 4  # per row: the factor of O, and the inverse row sum
REGISTERS = (192, 80, 48)  # softmax, correction, the others
PACKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ForwardConfig:
    """Compile-time facts of one Blackwell forward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and output; float16 otherwise.
        tile_d: head dim of Q and K, padded (the run-time head dim may be smaller: TMA fills with zeros).
        tile_dv: head dim of V and O, padded.
        causal: bottom-right causal mask.
        pack: query heads that share a tile's rows; a power of two, at most 64. Row ``r`` of a tile holds query
            ``r // pack`` of head ``r % pack`` of its group.
        negate: the softmax scale is negative: scores are negated before the maximum.
        tile_n: keys per block.
        stages: slots of the ring that K and V share.
        o_slots: tiles of O that wait in shared memory for their store.
        poly: exponentials of every 16 that the FMA units compute, instead of the special function unit; even.
        head: columns of P that P V may begin with, before the last ones are there.
    """

    bf16: bool
    tile_d: int
    tile_dv: int
    causal: bool
    pack: int = 1
    negate: bool = False
    tile_n: int = 128
    stages: int = 3
    o_slots: int = 2
    poly: int = 4
    head: int = 96

    def __post_init__(self):
        dims = (self.tile_d, self.tile_dv)
        if any(d <= 0 or d % COLUMN_STEP for d in dims):
            raise ValueError(f"head dims of a tile are {dims}; multiples of {COLUMN_STEP} only")
        if self.tile_n % 64 or not 64 <= self.tile_n <= 128:
            raise ValueError(f"tile_n is {self.tile_n}; supported are 64 and 128")
        if self.tile_dv > MAX_HEAD_DIM_V:
            raise ValueError(
                f"tile_dv is {self.tile_dv}: 2 x ({self.tile_n} + {self.tile_dv}) columns do not fit the "
                f"512 of tensor memory beside two S"
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

    @property
    def tile_m(self) -> int:
        """Rows of one CTA's tile: two Q tiles."""
        return Q_TILES * MMA_ROWS

    @property
    def cluster(self) -> int:
        """CTAs that work on one tile."""
        return 1

    @property
    def tile_q(self) -> int:
        """Queries of one CTA's tile."""
        return self.tile_m // self.pack

    def blocks(self, left=None, right=None) -> KvBlocks:
        """Which KV blocks a tile visits; this kernel knows no windows."""
        if (left, right) != (None, None):
            raise ValueError(f"window ({left}, {right}) for {self}")
        return KvBlocks(self.tile_q, self.tile_n, self.causal)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Numbers that the launch takes, in order."""
        return ("scale",)

    @property
    def counted(self):
        """None: there is no config that counts tiles worked on twice, since none are."""
        return None

    @property
    def optional_tensors(self) -> tuple[str, ...]:
        """Tensors that the launch takes after q, k, v, out and lse."""
        return ()

    def first_query(self, tile, q_tile):
        """First query of a Q tile; dual-mode, as the next."""
        return tile.m_block * self.tile_q + q_tile * (MMA_ROWS // self.pack)

    def phases(self, tile, q_tile, tiles) -> tuple[Phase, ...]:
        """Blocks of a tile as one Q tile sees them, counted from the last: those with a mask, then the others.

        The first is always masked. Once through the masked ones, each row has seen a key, or sees none.
        """
        if not self.causal:
            return (Phase(0, 1, True), Phase(1, tile.n_blocks, False))
        unmasked = tiles.blocks.unmasked(self.first_query(tile, q_tile), *tiles.lengths(tile))
        cut = imax(tile.n_blocks - unmasked, 1)
        return (Phase(0, cut, True), Phase(cut, tile.n_blocks, False))

    @property
    def kv_columns(self) -> int:
        """Columns of a slot that holds a block of K, or one of V: the wider of the two."""
        return max(self.tile_d, self.tile_dv)

    @property
    def q_bytes(self) -> int:
        """Bytes of one Q tile."""
        return MMA_ROWS * self.tile_d * ELEMENT_BYTES

    @property
    def kv_bytes(self) -> int:
        """Bytes of one slot of K or V."""
        return self.tile_n * self.kv_columns * ELEMENT_BYTES

    @property
    def o_bytes(self) -> int:
        """Bytes of O of one Q tile."""
        return MMA_ROWS * self.tile_dv * ELEMENT_BYTES

    @property
    def fits(self) -> bool:
        """Whether one CTA's shared memory holds the kernel; the buffers come first, and keep the alignment."""
        return self.graph.smem_bytes <= SMEM_LIMIT

    @property
    def graph(self) -> Graph:
        """Roles, rings, signals and memory."""
        softmax, others = REGISTERS[0], REGISTERS[2]
        soft = (Role("softmax0", range(0, 4), softmax), Role("softmax1", range(4, 8), softmax))
        correction = Role("correction", range(8, 12), REGISTERS[1])
        mma = Role("mma", range(12, 13), others)
        load = Role("load", range(13, 14), others)
        store = Role("store", range(14, 15), others)
        signals = [self._signals(i, soft[i], correction, mma) for i in range(Q_TILES)]
        return Graph(
            roles=(*soft, correction, mma, load, store),
            rings=(
                Ring("q", load, mma, (TMA, UMMA), Q_TILES, self.q_bytes),
                Ring("kv", load, mma, (TMA, UMMA), self.stages, self.kv_bytes),
                Ring("o", correction, store, (THREADS, THREADS), self.o_slots, self.o_bytes),
            ),
            signals=(*signals[0], *signals[1]),
            buffers=(
                Buffer("q", Q_TILES * self.q_bytes),
                Buffer("kv", self.stages * self.kv_bytes),
                Buffer("o", self.o_slots * self.o_bytes),
                Buffer("stat", STAT_BYTES),
            ),
            tmem=TmemMap(self.tile_n, self.tile_dv),
        )

    def _signals(self, i: int, soft: Role, correction: Role, mma: Role) -> tuple[Signal, ...]:
        """Events of one Q tile; ``docs/kernels/sm100-fwd.md`` says why each cover holds."""
        s, p, t, o, m, last, read = (f"{name}{i}" for name in "sptomlf")
        return (
            Signal(s, (mma,), soft, UMMA, (p,)),
            Signal(p, (soft, correction), mma, THREADS, (s, m)),
            Signal(t, (soft,), mma, THREADS, (s,)),
            Signal(o, (mma,), correction, UMMA, (p,)),
            Signal(m, (soft,), correction, THREADS, (p, s)),
            Signal(last, (soft,), correction, THREADS, (read,)),
            Signal(read, (correction,), soft, THREADS, (last,), credit=1),
        )


def can_implement(problem) -> str | None:
    """Why this kernel cannot run a problem, or None if it can."""
    for name, size, limit in (
        ("head_dim", problem.head_dim, MAX_HEAD_DIM),
        ("head_dim_v", problem.head_dim_v, MAX_HEAD_DIM_V),
    ):
        if size > limit:
            return f"{name} {size} exceeds {limit}: two tiles of S and O would not fit their memory"
    absent = {
        "windows": problem.window_left or problem.window_right,
        "softcap": problem.softcap,
        "learnable_sink": problem.sink,
        "alibi_slopes": problem.alibi,
        "score_mod": problem.score_mod,
        "mask_mod": problem.mask_mod,
        "sequences of different lengths (cu_seqlens, seqused)": problem.varlen,
    }
    missing = [name for name, wanted in absent.items() if wanted]
    return f"not built yet: {', '.join(missing)}" if missing else None


def choose_config(problem) -> tuple[ForwardConfig, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    tile_d, tile_dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    pack, why_pack = choose_pack(problem)
    fields = {
        "bf16": problem.dtype == torch.bfloat16,
        "tile_d": tile_d,
        "tile_dv": tile_dv,
        "causal": problem.causal,
        "pack": pack,
        "negate": problem.negative_scale,
    }
    config, why_memory = spend_memory(fields)
    share = (
        f"{config.poly} of 16 exponentials on the FMA units: the special function unit is the limit"
    )
    return config, (why_memory, share, why_pack)


def padded_head_dim(head_dim: int) -> int:
    """Head dim of the tile."""
    return -(-head_dim // COLUMN_STEP) * COLUMN_STEP


def spend_memory(fields: dict) -> tuple[ForwardConfig, str]:
    """Config with as many KV slots as there is room for, from 2 to 6, and two of O if there is; and the reason."""
    for o_slots, least in ((2, 3), (1, 2)):
        for stages in range(MAX_STAGES, least - 1, -1):
            config = ForwardConfig(**fields, o_slots=o_slots, stages=stages)
            if config.fits:
                return (
                    config,
                    f"{stages} slots of K and V, {o_slots} of O: what shared memory holds",
                )
    raise ValueError(f"two blocks of K and V do not fit beside Q and O: {fields}")


def choose_pack(problem) -> tuple[int, str]:
    """Query heads per tile, and the reason: all that share a KV head, or one."""
    ratio, rows = problem.gqa_ratio, Q_TILES * MMA_ROWS
    if ratio == 1:
        return 1, "one query head per KV head: nothing to pack"
    if problem.pack_gqa is False:
        return 1, "the caller wants heads unpacked"
    all_heads = next((p for p in PACKS if p >= ratio), PACKS[-1])
    candidates = (all_heads,) if problem.pack_gqa else (1, all_heads)

    def tiles(pack):
        return -(-ratio // pack) * -(-problem.seqlen_q * pack // rows)

    pack = min(candidates, key=lambda p: (tiles(p), p))
    return (
        pack,
        f"{pack} of {ratio} query heads per tile: {tiles(pack)} tiles per KV head, {tiles(1)} unpacked",
    )
