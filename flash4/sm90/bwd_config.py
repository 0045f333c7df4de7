"""Configuration and pipeline graph of the Hopper backward: every compile-time fact, DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.graph import Buffer, PipelineGraph, Ring, Role
from flash4.common.launch_facts import BackwardLaunch
from flash4.common.mod_facts import ModFacts, fields_of_mods, has_mods, lacks_derivative
from flash4.sm90.fwd_config import (
    ELEMENT_BYTES,
    MMA_ROWS,
    SMEM_ALIGN,
    SMEM_LIMIT,
    padded_head_dim,
)

FLOAT_BYTES = 4
MMA_WARPGROUPS = 2
TILE_N = MMA_ROWS * MMA_WARPGROUPS  # keys of a tile: each warpgroup's rows of S^T
MAX_HEAD_DIM = 128
REGISTERS = (240, 24)  # per thread of ``mma``, and of the warpgroup of the others
TURN_REGISTERS = (232, 40)  # where those work out more, and ``mma`` can spare them
STAGES = 2
TILE_SLOTS = 2  # of the ring of tiles, where they are handed out
SEQUENCE_WORDS = 16  # ``kv_one_tile.TILE_WORDS``
SEQUENCE_SLOTS = 2  # where a slot is held as long as its tile is worked on


class BackwardFacts(ModFacts, BackwardLaunch):
    """What follows from the fields of any Hopper backward's config."""

    # Where no score of a warp's step is large beside the cap, its tanh is a polynomial.
    near_cap = False

    @property
    def box_bytes(self) -> int:
        """Bytes of a warpgroup's box: of its part of dQ, and of dK or dV of its keys where they leave through it."""
        results = MMA_ROWS * ELEMENT_BYTES * max(self.tile_d, self.tile_dv)
        part = FLOAT_BYTES * self.dq_floats
        return max(part, results) if self.handed_out else part

    @property
    def statistics_bytes(self) -> int:
        """Bytes of LSE, or of D, of a step's queries."""
        return FLOAT_BYTES * self.tile_m

    @property
    def fits(self) -> bool:
        """Whether one CTA's shared memory holds the kernel."""
        return self.graph.smem_bytes + SMEM_ALIGN <= SMEM_LIMIT


@dataclass(frozen=True)
class BackwardConfig(BackwardFacts):
    """Compile-time facts of one Hopper backward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and gradients; float16 otherwise.
        tile_d: head dim of Q, K, dQ and dK, padded (TMA fills with zeros).
        tile_dv: head dim of V, dO and dV, padded.
        tile_m: queries per step.
        causal: bottom-right causal mask.
        swap_dq: dQ^T = K^T dS^T is multiplied instead of dQ = dS K: each warpgroup has 64 of 128 head dims, and a step
            any multiple of 16 queries.
        left: a window limits the keys before a query's own position; its side is a run-time value.
        right: a window limits the keys after it, and lets some through (none is ``causal``).
        softcap: scores are capped; the cap is a run-time value.
        alibi: scores lose a slope of their head times the distance between query and key.
        ordered: tiles add to dQ in a fixed order, so that it is bitwise repeatable.
        late: a step multiplies dQ of the step before, so that the warpgroups need not keep step.
        alternate: late, and the warpgroups multiply by turns: while one does, the other computes P and dS.
        first_stores: the first tile of keys stores its part of dQ where the others wait for it and add, so that nothing need
            be zero before. It must visit every block of queries.
        backwards: blocks of queries come by from the last to the first, so that all tiles of a head begin with the same.
        chained: the kernel is launched before the one before it has ended, and so is the one after it; each waits where it
            must.
        handed_out: a CTA takes tile after tile from a counter, and its loads run ahead into the next one.
        cu_q: queries are packed, one sequence behind the other.
        cu_k: keys and values are packed.
        used_q: queries in use are counted for each sequence.
        used_k: keys in use are counted for each sequence.
        score_mod: key of the callable that changes scores (``common.mods``); 0 is none.
        score_mod_bwd: key of the callable that takes gradients back through it.
        mask_mod: key of the callable that hides keys; 0 is none.
        aux: types of the tensors that mods read (``encode_aux``).
    """

    bf16: bool
    tile_d: int
    tile_dv: int
    tile_m: int
    causal: bool
    swap_dq: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    ordered: bool = False
    late: bool = False
    alternate: bool = False
    handed_out: bool = False
    first_stores: bool = False
    backwards: bool = False
    chained: bool = False
    cu_q: bool = False
    cu_k: bool = False
    used_q: bool = False
    used_k: bool = False
    score_mod: int = 0
    score_mod_bwd: int = 0
    mask_mod: int = 0
    aux: int = 0

    def __post_init__(self):
        self.check_mods()
        self._check_tile()
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")
        if self.alternate and not self.late:
            raise ValueError(
                "alternate without late: a turn would wait for dS of the other warpgroup"
            )
        if self.first_stores and (self.left or self.right):
            raise ValueError(
                "first_stores with a window: the first tile does not visit all queries"
            )
        if self.backwards and self.left:
            raise ValueError("backwards with a window that limits the left side is not built")

    def _check_tile(self):
        if self.swap_dq and (self.tile_d != 2 * MMA_ROWS or self.tile_m % 16):
            raise ValueError(
                f"swap_dq with tile_d {self.tile_d}, tile_m {self.tile_m}; it needs {2 * MMA_ROWS}, and a multiple of 16"
            )
        if not self.swap_dq and self.tile_m not in (MMA_ROWS, 2 * MMA_ROWS):
            raise ValueError(f"tile_m is {self.tile_m}; supported are 64 and 128, or swap_dq")

    @property
    def near_cap(self) -> bool:
        """See ``BackwardFacts``; beside mods registers do not allow both ways."""
        return self.softcap and not self.has_mods

    @property
    def tile_n(self) -> int:
        """Keys per tile."""
        return TILE_N

    @property
    def ds_stages(self) -> int:
        """Stages of dS: one step's is read while the next one's is written."""
        return STAGES

    @property
    def ctas(self) -> int:
        """CTAs that work on one tile."""
        return 1

    @property
    def splits_queries(self) -> bool:
        """Each warpgroup multiplies dQ of half of the queries; else of half of the head dims."""
        return self.tile_m == 2 * MMA_ROWS and not self.swap_dq

    @property
    def dq_shape(self) -> tuple[int, int]:
        """(queries, head dims) of a warpgroup's part of dQ."""
        if self.splits_queries:
            return self.tile_m // MMA_WARPGROUPS, self.tile_d
        return self.tile_m, self.tile_d // MMA_WARPGROUPS

    @property
    def dq_floats(self) -> int:
        """Numbers in a warpgroup's part of dQ."""
        return self.tile_m * self.dq_width // MMA_WARPGROUPS

    @property
    def tile_slots(self) -> tuple[int, int]:
        """(words, slots) of the ring of tiles."""
        return (SEQUENCE_WORDS, SEQUENCE_SLOTS) if self.varlen else (1, TILE_SLOTS)

    @property
    def tile_readers(self) -> int:
        """Warps that are told which tile comes next, where tiles are handed out."""
        return sum(self.graph.role(name).active_warps for name in ("reduce", "mma"))

    @property
    def graph(self) -> PipelineGraph:
        """Roles, rings and shared memory.

        load --[k x1 tma->warps]--> mma
        load --[v x1 tma->warps]--> mma
        load --[q x2 tma->warps]--> mma
        load --[do x2 tma->warps]--> mma
        load --[tiles x2 warp->warps]--> mma  (tiles handed out; ``reduce`` reads them too; of sequences x3)
        """
        turns = self.ordered and (self.left or self.tile_d < 128)
        places = self.varlen and self.splits_queries
        mma_registers, registers = TURN_REGISTERS if turns or places else REGISTERS
        load = Role("load", range(0, 1), 1, registers)
        reduce = Role("reduce", range(0, 1), MMA_WARPGROUPS, registers, first_warp=1)
        mma = Role("mma", range(1, 1 + MMA_WARPGROUPS), 4 * MMA_WARPGROUPS, mma_registers)
        k_bytes = TILE_N * self.dq_width * ELEMENT_BYTES
        dk_bytes, v_bytes = (TILE_N * d * ELEMENT_BYTES for d in (self.tile_d, self.tile_dv))
        q_bytes, do_bytes = (self.tile_m * d * ELEMENT_BYTES for d in (self.tile_d, self.tile_dv))
        statistics = self.statistics_bytes
        tiles, words = (), ()
        hosts = {"dk": "k", "dv": "v"}
        if self.handed_out:
            size, slots = self.tile_slots
            tiles = (Ring("tiles", load, mma, slots, FLOAT_BYTES * size, tma=False),)
            words = (Buffer("tiles", slots * FLOAT_BYTES * size),)
            hosts = {"dk": "dq", "dv": "dq"}
        return PipelineGraph(
            roles=(load, reduce, mma),
            rings=(
                Ring("k", load, mma, 1, k_bytes),
                Ring("v", load, mma, 1, v_bytes),
                Ring("q", load, mma, STAGES, q_bytes + statistics),
                Ring("do", load, mma, STAGES, do_bytes + statistics),
                *tiles,
            ),
            buffers=(
                Buffer("k", k_bytes),
                Buffer("v", v_bytes),
                Buffer("ds", STAGES * self.tile_m * TILE_N * ELEMENT_BYTES),
                Buffer("dq", MMA_WARPGROUPS * self.box_bytes),
                Buffer("q", STAGES * (q_bytes + statistics)),  # tiles, then LSE of each
                Buffer("do", STAGES * (do_bytes + statistics)),  # tiles, then D of each
                Buffer("dk", dk_bytes, borrows=hosts["dk"]),
                Buffer("dv", v_bytes, borrows=hosts["dv"]),
                *words,
            ),
        )


LATE_QUERIES = (
    2048  # from which on dQ a step late is faster at head dim 64: measured at 1024 and 4096
)


def can_implement(problem) -> str | None:
    """Why this kernel cannot run the backward of a problem, or None if it can."""
    obstacle = lacks_derivative(problem)
    if obstacle is not None:
        return obstacle
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"takes {name} up to {MAX_HEAD_DIM}, not {size}"
    return None


def choose_config(problem) -> tuple[BackwardConfig, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    tile_d, tile_dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    if has_mods(problem) and not (tile_d == tile_dv == 64 and not problem.aux):
        tile_d = 128  # steps of few queries need dQ to be swapped
    tile, why = choose_tile(tile_d, tile_dv, problem)
    config = BackwardConfig(
        bf16=problem.dtype == torch.bfloat16,
        tile_d=tile_d,
        tile_dv=tile_dv,
        causal=problem.causal,
        left=problem.window_left,
        right=problem.window_right,
        softcap=problem.softcap,
        alibi=problem.alibi,
        ordered=problem.deterministic,
        cu_q=problem.cu_q,
        cu_k=problem.cu_k,
        used_q=problem.used_q,
        used_k=problem.used_k,
        **fields_of_mods(problem),
        **tile,
    )
    fields, reasons = choose_order(config, problem)
    return replace(config, **fields), (why, *reasons)


def choose_tile(tile_d: int, tile_dv: int, problem) -> tuple[dict, str]:
    """Return the config fields that shape a step, and the reason.

    dK and dV of 64 keys stay in a thread's registers, (tile_d + tile_dv) / 2 of them; S, dP and P of a step take
    1.25 tile_m more, and a cap some to compute with.
    """
    if has_mods(problem):
        return _tile_of_mods(tile_d, tile_dv, problem)
    tile = {"tile_m": 64}
    windows_of_sequences = problem.varlen and problem.window_left
    if problem.softcap:
        if tile_d == tile_dv == 128:
            crowded = problem.window_left and problem.deterministic
            tile = {"tile_m": 48 if crowded else 64, "swap_dq": True}
    elif tile_d == tile_dv == 64 and not problem.deterministic and not windows_of_sequences:
        tile = {"tile_m": 128}
    elif tile_d == 128 and not (tile_dv == 128 and problem.deterministic and problem.window_left):
        tile = {"tile_m": 80, "swap_dq": True}
    dims = f"head dims {tile_d}/{tile_dv}{' and a cap' if problem.softcap else ''}"
    return tile, f"{tile['tile_m']} queries per step: what registers hold beside {dims}"


def _tile_of_mods(tile_d: int, tile_dv: int, problem) -> tuple[dict, str]:
    """As ``choose_tile``. S stays beside dP for a score_mod's derivative, and what mods load is in flight at once."""
    others = problem.softcap or problem.alibi or problem.deterministic
    others = others or problem.varlen or problem.window_left or problem.window_right
    queries = 32
    if problem.aux:
        queries = 16 if problem.varlen and tile_dv > 64 else 32
    elif not others:
        queries = 48 if problem.score_mod else 80
    tile = {"tile_m": queries, "swap_dq": True}
    if tile_d == tile_dv == 64:
        tile = {"tile_m": 64}
    dims = f"head dims {tile_d}/{tile_dv} and mods"
    return tile, f"{tile['tile_m']} queries per step: what registers hold beside {dims}"


def choose_order(config: BackwardConfig, problem) -> tuple[dict, tuple[str, ...]]:
    """Return the config fields that say who does what when, and the reasons."""
    window = config.left or config.right
    fields, reasons = {"chained": True}, ["kernels launched before the one before has ended"]
    # With the short steps that mods ask for there is no register left for it.
    crowded = has_mods(problem) and config.tile_m < MMA_ROWS
    if crowded or not replace(config, handed_out=True).fits:
        reasons.append("one CTA for each tile of keys: head dims or mods ask for it")
    else:
        fields |= {"handed_out": True, "backwards": not config.left}
        reasons.append("tiles handed out")
        visited = problem.varlen or not problem.causal or problem.seqlen_q <= problem.seqlen_k
        if not window and visited:
            fields["first_stores"] = True
            reasons.append(
                "the first tile visits all queries, and stores its part of dQ instead of adding it to zeros"
            )
    if config.tile_m == 2 * MMA_ROWS and not window and problem.seqlen_q >= LATE_QUERIES:
        fields |= {"late": True, "alternate": True}
        reasons.append(
            f"dQ a step late, and products by turns: from {LATE_QUERIES} queries on tiles are long enough for it to pay"
        )
    elif config.near_cap and config.tile_d == config.tile_dv == MAX_HEAD_DIM:
        fields["late"] = True
        reasons.append(
            "dQ a step late: warpgroups need not keep step while they work out a cap's tanh"
        )
    return fields, tuple(reasons)
