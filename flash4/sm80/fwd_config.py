"""Configuration of the Ampere forward: every compile-time fact, DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.geometry import Phase, imax, imin
from flash4.common.graph import WARP, Buffer, PipelineGraph, Role, launch_registers
from flash4.common.launch_facts import ForwardLaunch
from flash4.sm80.shared_rows import SharedRows

ELEMENT_BYTES = 2
ATOM_ROWS = 16  # rows of one mma.sync
KEY_STEP = 16  # keys that one mma.sync of P V contracts
DIM_STEP = 32  # head dims are padded in shared memory to a multiple of this
MAX_HEAD_DIM = 256
MAX_REGISTERS = 256  # of a thread
SMEM_ALIGN = 1_024  # the swizzle repeats every 1,024 bytes
GROWTH_LOG2 = (
    8  # P may grow to 2 to this before its row's shift moves: far from the limits of float16
)
PACKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ForwardConfig(ForwardLaunch):
    """Compile-time facts of one Ampere forward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and output; float16 otherwise.
        tile_d: head dim of Q and K, padded (the run-time head dim may be smaller: copies fill with zeros).
        tile_dv: head dim of V and O, padded.
        warps: of a CTA.
        atoms: of 16 rows that each warp owns; what it reads of K and V serves all of them.
        tile_n: keys per block.
        causal: bottom-right causal mask.
        stages: slots of the K ring and of the V ring.
        ctas_per_sm: CTAs that share a multiprocessor: registers are limited accordingly.
        pack: query heads that share a tile's rows; a power of two, at most 64. Row ``r`` of a tile holds query
            ``r // pack`` of head ``r % pack`` of its group.
        negate: the softmax scale is negative: scores are negated before the maximum.
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
    warps: int
    atoms: int
    tile_n: int
    causal: bool
    stages: int = 2
    ctas_per_sm: int = 1
    pack: int = 1
    negate: bool = False
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
        for name, size in (("tile_d", self.tile_d), ("tile_dv", self.tile_dv)):
            if size % DIM_STEP or not DIM_STEP <= size <= MAX_HEAD_DIM:
                raise ValueError(f"{name} is {size}; supported are multiples of {DIM_STEP} to 256")
        if self.warps not in (4, 8) or self.atoms not in (1, 2):
            raise ValueError(
                f"{self.warps} warps of {self.atoms} atoms; supported are 4 and 8 of 1 and 2"
            )
        if self.tile_n % KEY_STEP or self.tile_n <= 0:
            raise ValueError(f"tile_n is {self.tile_n}; supported are multiples of {KEY_STEP}")
        if self.stages < 2:
            raise ValueError(
                f"stages is {self.stages}; a ring needs at least 2: copies run a block ahead"
            )
        if self.pack not in PACKS:
            raise ValueError(f"pack is {self.pack}; supported are {PACKS}")
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP

    @property
    def warp_rows(self) -> int:
        """Rows of a tile that one warp owns."""
        return self.atoms * ATOM_ROWS

    @property
    def tile_m(self) -> int:
        """Rows per tile."""
        return self.warps * self.warp_rows

    ctas = 1  # that work on a tile together, as configs of all architectures call them
    counted = None  # no tile is ever worked on again

    @property
    def handed_out(self) -> bool:
        """Tiles differ in length; each has a CTA of its own, and the hardware starts these in order as others end."""
        return (self.causal or self.right) and not self.varlen

    @property
    def natural(self) -> bool:
        """Verbs scale scores one by one, in natural units: a mod takes them so."""
        return self.score_mod != 0

    @property
    def changes_scores(self) -> bool:
        """Verbs scale scores one by one, unless natural in log2 units, since they change them on the way."""
        return self.softcap or self.alibi or self.natural

    @property
    def may_hide_any(self) -> bool:
        """A score may become -inf in any block, not in those alone that a mask cuts."""
        return self.score_mod != 0 or self.mask_mod != 0

    @property
    def crowd(self) -> int:
        """How much features keep in registers, where a large tile leaves none; mods, their tensors and slopes count twice."""
        mods = 2 * self.may_hide_any + bool(self.score_mod and self.mask_mod) + 2 * bool(self.aux)
        return mods + self.left + self.right + self.softcap + 2 * self.alibi + self.varlen

    def phases(self, tile, tiles) -> tuple[Phase, ...]:
        """Blocks of a tile, counted from its last: those with a mask at their right, those without, those with one at their left.

        The last block may reach past the last key, so that it is always masked.
        """
        blocks, lengths = tiles.blocks, tiles.lengths(tile)
        count, end, masked = tile.n_blocks, tile.first_block + tile.n_blocks, 1
        if blocks.ends_early:
            masked = end - blocks.unmasked(tile.m_block * self.tile_q, *lengths)
            masked = imin(imax(masked, 1), count)
        if not self.left:
            return Phase(0, masked, True), Phase(masked, count, False)
        last_query = (tile.m_block + 1) * self.tile_q - 1
        cut = imin(imax(end - blocks.unmasked_from(last_query, *lengths), masked), count)
        return Phase(0, masked, True), Phase(masked, cut, False), Phase(cut, count, True)

    @property
    def rows_q(self) -> SharedRows:
        """Q in shared memory."""
        return SharedRows(self.tile_m, self.tile_d)

    @property
    def rows_k(self) -> SharedRows:
        """A slot of K."""
        return SharedRows(self.tile_n, self.tile_d)

    @property
    def rows_v(self) -> SharedRows:
        """A slot of V."""
        return SharedRows(self.tile_n, self.tile_dv)

    @property
    def rows_o(self) -> SharedRows:
        """O on its way out."""
        return SharedRows(self.tile_m, self.tile_dv)

    @property
    def graph(self) -> PipelineGraph:
        """The one role, and shared memory; the slots of K and V need no barriers but that of the CTA."""
        role = Role("attend", range(self.warps // 4), self.warps, self.registers)
        buffers = (
            Buffer("q", self.rows_q.nbytes),
            Buffer("k", self.stages * self.rows_k.nbytes),
            Buffer("v", self.stages * self.rows_v.nbytes),
            Buffer("o", self.rows_o.nbytes, borrows="q"),
        )
        return PipelineGraph(roles=(role,), rings=(), buffers=buffers)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.graph.smem_bytes

    @property
    def registers(self) -> int:
        """Registers that a thread may have; the last of 256 is out of reach."""
        threads = self.threads * self.ctas_per_sm
        return min(launch_registers(threads) // threads, MAX_REGISTERS)


@dataclass(frozen=True)
class Card:
    """A kind of GPU that this kernel serves.

    Attributes:
        smem_bytes: shared memory that one CTA can have.
        sm_smem_bytes: shared memory of a multiprocessor, of which each CTA takes ``CTA_RESERVED`` besides its own.
        newer: what kernels of its own would be made of, had flash4 any; "" if it has nothing newer.
    """

    smem_bytes: int
    sm_smem_bytes: int
    newer: str = ""

    def can_implement(self, problem) -> str | None:
        """Why this kernel cannot run a problem, or None if it can."""
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if size > MAX_HEAD_DIM:
                return f"{name} {size} exceeds {MAX_HEAD_DIM}: a tile's accumulators would not fit the registers"
        return None

    def holds(self, config: ForwardConfig) -> bool:
        """Whether its shared memory holds as many CTAs as the config says."""
        needed = config.smem_bytes + SMEM_ALIGN
        together = config.ctas_per_sm * (needed + CTA_RESERVED)
        return needed <= self.smem_bytes and together <= self.sm_smem_bytes

    def choose_config(self, problem) -> tuple[ForwardConfig, tuple[str, ...]]:
        """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
        import torch

        tile_d, tile_dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
        config = ForwardConfig(
            bf16=problem.dtype == torch.bfloat16,
            tile_d=tile_d,
            tile_dv=tile_dv,
            **SMALLEST_TILE,
            causal=problem.causal,
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
        )
        tiles = (replace(config, **tile) for tile in tiles_for(config))
        config = next(tile for tile in tiles if self.holds(tile))
        pack, why_pack = choose_pack(problem, config.tile_m)
        whose = f"{self.newer} of its own are not built for this card: " if self.newer else ""
        why = (
            f"{whose}Ampere instructions serve it",
            f"{config.tile_m} rows by {config.tile_n} keys, {config.stages} slots, {config.ctas_per_sm} CTAs "
            f"to an SM: {config.smem_bytes} bytes of shared memory each, of {self.sm_smem_bytes}",
        )
        return replace(config, pack=pack), (*why, why_pack)


CTA_RESERVED = 1_024  # bytes of shared memory that the driver takes for each CTA
A100 = Card(163 << 10, 164 << 10)  # 8.0, 8.7
SMALL = Card(99 << 10, 100 << 10)  # 8.6, 8.9
CONSUMER_BLACKWELL = Card(99 << 10, 100 << 10, "kernels")  # 12.0, 12.1
HOPPER = Card(227 << 10, 228 << 10)  # which has its own, but may try this one
SMALLEST_TILE = {"warps": 4, "atoms": 1, "tile_n": 16, "stages": 2}


def padded_head_dim(head_dim: int) -> int:
    """Head dim of the tile."""
    return -(-head_dim // DIM_STEP) * DIM_STEP


# (warps, atoms, keys, slots, CTAs to an SM), the fastest first; what a card cannot hold is passed over.
TILES = (
    *((4, 2, 64, 2, 2), (4, 2, 32, 2, 2), (4, 2, 32, 2, 1)),
    *((8, 1, 64, 2, 1), (8, 1, 32, 2, 1), (4, 1, 32, 2, 1), (4, 1, 16, 2, 1)),
)
# Up to a head dim: (warps, atoms, keys) -> how crowded a call may be before ptxas spills in main loops; -1: not even plain.
# The others take any call.
ROOM = {
    64: {(4, 2, 64): 3, (4, 2, 32): 6, (8, 1, 64): 6},
    96: {(4, 2, 64): 2, (4, 2, 32): 6, (8, 1, 64): 6},
    128: {(4, 2, 64): 0, (4, 2, 32): 2, (8, 1, 64): 4},
    224: {(4, 2, 64): -1, (4, 2, 32): -1, (8, 1, 64): 4},
    256: {(4, 2, 64): -1, (4, 2, 32): -1, (8, 1, 64): 2, (4, 1, 32): 3},
}


def tiles_for(config: ForwardConfig) -> list[dict]:
    """Fields that shape a tile, of ``TILES`` those that leave room for the features of a call."""
    wide = max(config.tile_d, config.tile_dv)
    room = ROOM[next(limit for limit in ROOM if wide <= limit)]
    names = ("warps", "atoms", "tile_n", "stages", "ctas_per_sm")
    tiles = [tile for tile in TILES if config.crowd <= room.get(tile[:3], config.crowd)]
    return [dict(zip(names, tile, strict=True)) for tile in tiles]


def choose_pack(problem, tile_m: int) -> tuple[int, str]:
    """Query heads per tile, and the reason: all that share a KV head, or one.

    Nothing between: the choice depends on the number of queries, and each is a kernel to compile.
    """
    ratio = problem.gqa_ratio
    if ratio == 1:
        return 1, "one query head per KV head: nothing to pack"
    if problem.pack_gqa is False:
        return 1, "the caller wants heads unpacked"
    all_heads = next((p for p in PACKS if p >= ratio), PACKS[-1])
    candidates = (all_heads,) if problem.pack_gqa else (1, all_heads)

    def tiles(pack):
        return -(-ratio // pack) * -(-problem.seqlen_q * pack // tile_m)

    pack = min(candidates, key=lambda p: (tiles(p), p))
    why = f"{pack} of {ratio} query heads per tile: {tiles(pack)} tiles per KV head, {tiles(1)} unpacked"
    return pack, why
