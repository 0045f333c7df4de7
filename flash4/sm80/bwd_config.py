"""Configuration of the Ampere backward: every compile-time fact, DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.graph import WARP, Buffer, PipelineGraph, Role, launch_registers
from flash4.common.kv_tiles import kv_grid_of
from flash4.common.launch_facts import BackwardLaunch
from flash4.common.mod_facts import ModFacts, fields_of_mods, lacks_derivative
from flash4.sm80.fwd_config import (
    ATOM_ROWS,
    CTA_RESERVED,
    DIM_STEP,
    MAX_HEAD_DIM,
    MAX_REGISTERS,
    SMEM_ALIGN,
    padded_head_dim,
)
from flash4.sm80.shared_rows import SharedRows

FLOAT_BYTES = 4
DIM_PAIR = 16  # columns of what ldmatrix reads at once
JOINT_DIM = 128  # up to this head dim a warp's registers hold both dK and dV of 16 keys, or one of them of 32
NARROW_DIM = 32  # up to this head dim one role reads about as little shared memory as two
# Features of a call that hold registers around a loop in one role, from which on it has more of them: to head dim 64, and above.
CROWD, WIDE_CROWD = 2, 4
FEW_TILES = 64  # of 128 keys: half of the multiprocessors of cards that hold them; half as wide ones are quicker
MAX_HANDED = 64  # queries of one band, where what a warp has of P lies together
LOOP_REGISTERS = 60  # that a step of two roles takes beside its sum and scores
HALF_REGISTERS, SIDE_REGISTERS = 4, 2  # and P of float16, and each side of a window
MASK_REGISTERS = 23  # that a mask takes beside them, and a bias as many


@dataclass(frozen=True)
class Run:
    """One of ``count`` equal runs of a warp's queries of S or dP: all is done with one before the next begins."""

    number: int
    count: int

    @property
    def first(self) -> bool:
        """Whether it is the first one."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it is the last one."""
        return self.number == self.count - 1

    def of(self, size: int) -> range:
        """Its part of a size."""
        each = size // self.count
        return range(self.number * each, (self.number + 1) * each)


WHOLE = Run(0, 1)


def runs_of(count: int) -> tuple[Run, ...]:
    """All runs of so many."""
    return tuple(Run(number, count) for number in range(count))


@dataclass(frozen=True)
class BackwardConfig(ModFacts, BackwardLaunch):
    """Compile-time facts of one Ampere backward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and gradients; float16 otherwise.
        tile_d: head dim of Q, K, dQ and dK, padded (copies fill with zeros).
        tile_dv: head dim of V, dO and dV, padded.
        tile_m: queries per step.
        causal: bottom-right causal mask.
        warps: of a CTA.
        key_warps: that share the keys of a tile, 16 to each (32 of two roles); more warps than that split queries, and columns of
            dK and dV, among them.
        two_roles: half of the warps multiply S and dV, the others dP and dK: each has 32 keys of S or dP, and the same keys of
            dV or dK; or, where warps split queries, all keys of some columns.
        stages: slots of Q and dO. With one the next step's are copied when this one is done.
        ctas_per_sm: CTAs that share a multiprocessor: registers are limited accordingly.
        left: a window limits the keys before a query's own position; its side is a run-time value.
        right: a window limits the keys after it, and lets some through (none is ``causal``).
        softcap: scores are capped; the cap is a run-time value.
        alibi: scores lose a slope of their head times the distance between query and key.
        ordered: tiles add to dQ in a fixed order, so that it is bitwise repeatable.
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
    warps: int = 8
    key_warps: int = 8
    stages: int = 2
    ctas_per_sm: int = 1
    two_roles: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    ordered: bool = False
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
        for name, size in (("tile_d", self.tile_d), ("tile_dv", self.tile_dv)):
            if size % DIM_STEP or not DIM_STEP <= size <= MAX_HEAD_DIM:
                raise ValueError(f"{name} is {size}; supported are multiples of {DIM_STEP} to 256")
        if self.warps not in (4, 8) or self.role_warps not in (self.key_warps, 2 * self.key_warps):
            raise ValueError(
                f"{self.warps} warps, {self.key_warps} to the keys; supported are 4 and 8, all or half of them"
            )
        if self.two_roles and (self.warps != 8 or self.softcap or self.ordered or self.has_mods):
            raise ValueError(
                "two roles need 8 warps; they have no softcap, no order of sums and no mods"
            )
        if self.hands_over and self.tile_m > MAX_HANDED:
            raise ValueError(
                f"P of {self.tile_m} queries cannot be handed over; at most {MAX_HANDED} can"
            )
        for size in (self.tile_d, self.tile_dv):
            if size % (self.column_parts * DIM_PAIR):
                raise ValueError(
                    f"{size} columns of dK or dV cannot be shared out to {self.column_parts} warps, by {DIM_PAIR}"
                )
        if self.tile_m % DIM_STEP or self.tile_m <= 0:
            raise ValueError(f"tile_m is {self.tile_m}; supported are multiples of {DIM_STEP}")
        if query_warps(self.tile_m, self.tile_d, self.warps) is None:
            raise ValueError(
                f"dQ of {self.tile_m} by {self.tile_d} cannot be shared out to {self.warps} warps"
            )
        if self.stages not in (1, 2):
            raise ValueError(f"stages is {self.stages}; supported are 1 and 2")
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")

    ctas = 1  # that work on a tile together, as configs of all architectures call them
    ragged_q = ragged_k = False  # of tensors that must have whole rows to an entry: none must

    @property
    def order_of_sums(self) -> dict[str, int]:
        """Sums of dQ lie as accumulators of warps have them."""
        return {"warps": self.warps, "query_warps": self.query_warps}

    @property
    def splits(self) -> int:
        """Warps of a role that share keys."""
        return self.role_warps // self.key_warps

    @property
    def role_warps(self) -> int:
        """Warps of a role."""
        return self.warps // 2 if self.two_roles else self.warps

    @property
    def key_atoms(self) -> int:
        """Times 16 keys that a warp has of S or dP."""
        return 2 if self.two_roles else 1

    @property
    def sum_atoms(self) -> int:
        """Times 16 keys that a warp has of dK or dV."""
        return self.tile_n // ATOM_ROWS // (self.role_warps // self.column_parts)

    @property
    def column_parts(self) -> int:
        """Warps that split the columns of dK, or of dV, among them."""
        return self.role_warps if self.two_roles and not self.keeps_p else self.splits

    @property
    def keeps_p(self) -> bool:
        """A warp has all of P, or of dS, that its own dV, or dK, takes."""
        return self.splits == 1

    @property
    def hands_over(self) -> bool:
        """P goes from each warp of one role to one of the other, through the place that dS then takes."""
        return self.two_roles and self.keeps_p

    def runs(self, role: int, masked: bool) -> tuple[Run, ...]:
        """Runs of queries in which one of two roles takes a step: as few as leave it registers; two if nothing does.

        The rows of one operand are read for each of them. A lane has, of 32 keys, a column of its sum or of scores to a register.
        """
        if not self.hands_over:
            return (WHOLE,)
        needed = (self.tile_dv, self.tile_d)[role] + LOOP_REGISTERS
        if role == 0:
            needed += MASK_REGISTERS * (masked + self.alibi)
            needed += HALF_REGISTERS * (not self.bf16) + SIDE_REGISTERS * (self.left + self.right)
        counts = (1, 2, self.tile_m // DIM_PAIR)
        room = [n for n in counts if needed + self.tile_m // n <= self.registers]
        return runs_of(room[0] if room else 2)

    def runs_of_dq(self, role: int) -> tuple[Run, ...]:
        """The same of dQ, which one of two roles multiplies beside its sum, and one role beside both and what mods need."""
        size = (self.tile_dv, self.tile_d)[role]
        if not self.two_roles:
            size = max(self.tile_d, self.tile_dv)
        wide = (self.hands_over or self.has_mods) and size > JOINT_DIM
        return runs_of(2 if wide and self.dq_shape[0] > ATOM_ROWS else 1)

    def mods_apart(self, row: int) -> bool:
        """Whether a basic block ends behind the pair of one of a thread's two rows.

        Or ptxas would load and compute for all pairs at once: with mods behind every two, at wide heads with a cap and windows
        on both sides behind each.
        """
        wide = max(self.tile_d, self.tile_dv) > JOINT_DIM
        each = wide and self.softcap and self.left and self.right
        return self.has_mods and (row == 1 or each)

    @property
    def crowded(self) -> bool:
        """Whether features hold so many registers around a loop that a thread gets more of them, or less to do."""
        narrow = max(self.tile_d, self.tile_dv) <= JOINT_DIM // 2
        return self.held >= (CROWD if narrow else WIDE_CROWD)

    @property
    def held(self) -> int:
        """How many features hold registers around a loop, a cap as many as two."""
        masks = (self.causal, self.left, self.right)
        return sum((*masks, 2 * self.softcap, self.alibi, self.ordered, self.varlen))

    def asks_for_lanes(self, role: int = 0) -> bool:
        """Whether verbs ask for the number of their lane anew: what follows from it would stay in registers around the loop.

        A step has more instructions so. Three CTAs that share a multiprocessor cannot do without, nor can P of float16 at head
        dim 128 without slopes, nor wider sums, nor, above head dim 128, crowded configs, mods, and sequences.
        """
        if not self.hands_over:
            wide = max(self.tile_d, self.tile_dv) > JOINT_DIM
            full = wide and (self.crowded or self.has_mods or self.varlen)
            return self.ctas_per_sm > 2 or role == 0 and full
        size = (self.tile_dv, self.tile_d)[role]
        return size > JOINT_DIM or role == 0 and size == JOINT_DIM and not (self.bf16 or self.alibi)

    @property
    def most_runs(self) -> int:
        """Runs of the step that has most."""
        return max(len(self.runs(role, masked)) for role in (0, 1) for masked in (False, True))

    @property
    def ds_slots(self) -> int:
        """Slots of dS: two where dQ of a step is multiplied in the next one."""
        return self.stages if self.two_roles else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP

    @property
    def tile_n(self) -> int:
        """Keys per tile."""
        return self.key_warps * self.key_atoms * ATOM_ROWS

    @property
    def query_warps(self) -> int:
        """Warps that share the queries of dQ; the others split its columns."""
        return query_warps(self.tile_m, self.tile_d, self.warps)

    @property
    def dq_shape(self) -> tuple[int, int]:
        """(queries, columns) of dQ that one warp multiplies."""
        return self.tile_m // self.query_warps, self.tile_d * self.query_warps // self.warps

    def rows(self, name: str) -> SharedRows:
        """An array in shared memory; of q and do a slot."""
        shapes = {
            "q": (self.tile_m, self.tile_d),
            "do": (self.tile_m, self.tile_dv),
            "k": (self.tile_n, self.tile_d),
            "v": (self.tile_n, self.tile_dv),
            "p": (self.tile_n, self.tile_m),
            "ds": (self.tile_n, self.tile_m),
        }
        return SharedRows(*shapes[name])

    @property
    def statistics_bytes(self) -> int:
        """Bytes of LSE, or of D, of a step's queries."""
        return self.tile_m * FLOAT_BYTES

    @property
    def graph(self) -> PipelineGraph:
        """The roles, and shared memory; slots need no barriers but that of the CTA."""
        names = ("mma_v", "mma_k") if self.two_roles else ("differentiate",)
        groups = self.role_warps // 4
        roles = tuple(
            Role(name, range(n * groups, (n + 1) * groups), self.role_warps, self.registers)
            for n, name in enumerate(names)
        )
        once = ("k", "v") if self.keeps_p else ("k", "v", "p")
        handed = Buffer("p", self.ds_slots * self.rows("p").nbytes, borrows="ds")
        buffers = (
            *(Buffer(name, self.rows(name).nbytes) for name in once),
            Buffer("ds", self.ds_slots * self.rows("ds").nbytes),
            *(Buffer(name, self.stages * self.rows(name).nbytes) for name in ("q", "do")),
            *(Buffer(name, self.stages * self.statistics_bytes) for name in ("lse", "delta")),
            Buffer("dk", self.rows("k").nbytes, borrows="k"),
            Buffer("dv", self.rows("v").nbytes, borrows="v"),
            *((handed,) if self.hands_over else ()),
        )
        return PipelineGraph(roles=roles, rings=(), buffers=buffers)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA; each array begins at a multiple of the swizzle's."""
        sizes = self.graph.allocations().values()
        return sum(-(-nbytes // SMEM_ALIGN) * SMEM_ALIGN for nbytes in sizes)

    @property
    def fits(self) -> bool:
        """Whether any card that may try it holds it."""
        return HOPPER.holds(self)

    @property
    def registers(self) -> int:
        """Registers that a thread may have; the last of 256 is out of reach."""
        threads = self.threads * self.ctas_per_sm
        return min(launch_registers(threads) // threads, MAX_REGISTERS)


def query_warps(tile_m: int, tile_d: int, warps: int) -> int | None:
    """How many of the warps share the queries of dQ: each has as square a part as can be; None if no number will do."""
    for rows in (2 * ATOM_ROWS, ATOM_ROWS):
        shares = tile_m // rows
        if warps % shares == 0 and tile_d % (warps // shares * ATOM_ROWS) == 0:
            return shares
    return None


@dataclass(frozen=True)
class BackwardCard:
    """A kind of GPU that this kernel serves; as ``fwd_config.Card``."""

    smem_bytes: int
    sm_smem_bytes: int
    newer: str = ""

    def can_implement(self, problem) -> str | None:
        """Why this kernel cannot run the backward of a problem, or None if it can."""
        obstacle = lacks_derivative(problem)
        if obstacle is not None:
            return obstacle
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if size > MAX_HEAD_DIM:
                return f"takes {name} up to {MAX_HEAD_DIM}, not {size}"
        return None

    def holds(self, config: BackwardConfig) -> bool:
        """Whether its shared memory holds as many CTAs as the config says."""
        needed = config.smem_bytes + SMEM_ALIGN
        together = config.ctas_per_sm * (needed + CTA_RESERVED)
        return needed <= self.smem_bytes and together <= self.sm_smem_bytes

    def choose_config(self, problem) -> tuple[BackwardConfig, tuple[str, ...]]:
        """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
        import torch

        dims = (padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
        features = {
            "left": problem.window_left,
            "right": problem.window_right,
            "softcap": problem.softcap,
            "alibi": problem.alibi,
            "ordered": problem.deterministic,
            "cu_q": problem.cu_q,
            "cu_k": problem.cu_k,
            "used_q": problem.used_q,
            "used_k": problem.used_k,
            **fields_of_mods(problem),
        }
        bf16 = problem.dtype == torch.bfloat16
        config = BackwardConfig(
            bf16, *dims, tile_m=DIM_STEP, causal=problem.causal, warps=4, key_warps=2, **features
        )
        lack = two_roles_lack(config, problem)
        tiles = (replace(config, **tile) for tile in tiles_for(config, lack is None))
        config = next(config for config in tiles if self.holds(config))
        whose = f"{self.newer} of its own are not built for this card: " if self.newer else ""
        return config, (
            f"{whose}Ampere instructions serve it",
            f"{config.tile_n} keys by {config.tile_m} queries, {config.stages} slots: {config.smem_bytes} bytes of "
            f"shared memory, of {self.sm_smem_bytes}",
            *((_WHY_TILE_OF_MODS,) if config.has_mods else ()),
            _why_roles(config, lack),
        )


A100 = BackwardCard(163 << 10, 164 << 10)  # 8.0, 8.7
SMALL = BackwardCard(99 << 10, 100 << 10)  # 8.6, 8.9
CONSUMER_BLACKWELL = BackwardCard(99 << 10, 100 << 10, "kernels")  # 12.0, 12.1
HOPPER = BackwardCard(227 << 10, 228 << 10)  # which has its own, but may try this one


def two_roles_lack(config: BackwardConfig, problem) -> str | None:
    """Why two roles do not share a problem's work, or None if they can."""
    if config.has_mods:
        return "mods"
    if config.softcap or config.ordered:
        return "a cap" if config.softcap else "a fixed order of sums"
    wide = max(config.tile_d, config.tile_dv)
    if wide <= NARROW_DIM:
        return f"head dims up to {NARROW_DIM}"
    if wide <= JOINT_DIM:
        tiles = kv_grid_of(problem, replace(config, **OWN_KEYS).tile_n).total
        return f"{tiles} tiles of keys of theirs" if tiles <= FEW_TILES else None
    share = 4 * DIM_PAIR
    uneven = [size for size in (config.tile_d, config.tile_dv) if size % share]
    return f"{uneven[0]} columns, which are no multiple of {share}" if uneven else None


_WHY_TILE_OF_MODS = "two warps to the same keys: registers for what mods load and compute"


def _why_roles(config: BackwardConfig, lack: str | None) -> str:
    if config.two_roles:
        when = "a step late" if config.ds_slots == 2 else "beside the next step's copies"
        keys = "of its own 32 keys" if config.keeps_p else "of all keys"
        return (
            f"half of the warps keep dK, the others dV, each {keys}: they read less shared memory; "
            f"dQ is multiplied {when}"
        )
    lack = lack or "so little shared memory"
    return f"every warp keeps some of dK and of dV: no roles of their own for {lack}"


SHORT_STEPS = [(32, 4, 4, 2, 2), (32, 4, 4, 2, 1)]  # as in ``tiles_for``
TWO_ROLES = {"tile_m": 64, "warps": 8, "key_warps": 2, "two_roles": True}
OWN_KEYS = TWO_ROLES | {"key_warps": 4}


def tiles_for(config: BackwardConfig, two_roles: bool) -> list[dict]:
    """Fields that shape a tile, the fastest first; what a card cannot hold is passed over. Measured: bench/NOTES.md."""
    wide, found = max(config.tile_d, config.tile_dv), []
    if wide <= JOINT_DIM and two_roles:
        found = [OWN_KEYS]
    if config.has_mods:
        tiles = _tiles_of_mods(config)
    elif wide <= JOINT_DIM // 2:
        tiles = [(64, 4, 4, 2, 3), (64, 4, 4, 2, 2), (64, 4, 4, 2, 1)]
        if config.crowded or wide > NARROW_DIM and not config.ordered:  # or few: none shares
            tiles = tiles[1:]
        tiles = SHORT_STEPS if _in_pairs(config) >= WIDE_CROWD else tiles
    elif wide <= JOINT_DIM:
        tiles = [(64, 4, 4, 2, 2), (64, 8, 8, 2, 1), (32, 4, 4, 2, 1)]
        if _in_pairs(config) >= WIDE_CROWD - 1:
            tiles = [*tiles[:1], *SHORT_STEPS][_in_pairs(config) >= WIDE_CROWD :]
    else:  # a step's copies ahead pay only where a mask makes steps of different lengths
        tiles = [(64, 8, 4, 2, 1), (64, 8, 4, 1, 1)][:: 1 if config.causal else -1]
        tiles = [] if config.crowded else tiles
        tiles += [(32, 8, 4, 2, 1), (32, 4, 2, 2, 1), (32, 4, 2, 1, 1)]
        if two_roles:
            slots = (2, 1) if config.held < WIDE_CROWD - 1 else (1,)
            found = [TWO_ROLES | {"stages": stages} for stages in slots]
    names = ("tile_m", "warps", "key_warps", "stages", "ctas_per_sm")
    found += [dict(zip(names, tile, strict=True)) for tile in tiles]
    return [tile for tile in found if query_warps(tile["tile_m"], config.tile_d, tile["warps"])]


def _in_pairs(config: BackwardConfig) -> int:
    """What one role holds, where a warp has dK and dV of 16 keys: some features take more together than each alone."""
    both_sides = config.left and config.right
    return config.held + 2 * both_sides + (config.softcap and config.alibi)


def _tiles_of_mods(config: BackwardConfig) -> list[tuple]:
    """As there: two warps share keys, so that registers hold what mods load and compute for many pairs at once.

    dK and dV take a quarter of their columns in registers, dQ of 64 queries a quarter of its own.
    """
    columns, crowded = config.tile_d + config.tile_dv, config.aux or config.varlen
    shorter = [(32, 8, 4, 2, 1), (32, 4, 2, 2, 1)]
    if columns > 256 and crowded:
        tiles = [(32, 8, 4, 1, 1)]
    elif columns > 448:
        tiles = shorter
    elif columns > 320 or config.tile_d > 192:
        tiles = [(64, 8, 4, 1, 1), *shorter]
    else:
        tiles = [(64, 8, 4, 2, 1), (32, 8, 4, 2, 1), (64, 8, 4, 1, 1), (32, 4, 2, 2, 1)]
    crowded = crowded or config.softcap or config.alibi or config.ordered
    crowded = crowded or config.left or config.right or config.score_mod and config.mask_mod
    if max(config.tile_d, config.tile_dv) <= JOINT_DIM // 2 and not crowded:
        tiles.insert(0, (64, 8, 4, 2, 2))
    return [*tiles, (32, 4, 2, 1, 1)]
