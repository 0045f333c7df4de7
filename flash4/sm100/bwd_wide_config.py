"""Configuration of the Blackwell backward for head dims above 128; see ``bwd_config``. DSL-free."""

from dataclasses import dataclass

from flash4.common.mod_facts import fields_of_mods, lacks_derivative
from flash4.sm100.bwd_config import (
    EXPONENTIALS,
    FLOAT_BYTES,
    MMA_FLOPS,
    PANEL,
    REGISTERS,
    SMEM_CYCLES,
    BackwardConfig,
)
from flash4.sm100.bwd_graph import CHUNK, ROWS, Ring, Signal, TmemMap
from flash4.sm100.fwd_config import COLUMN_STEP, ELEMENT_BYTES
from flash4.sm100.fwd_graph import THREADS, TMEM_COLUMNS

MAX_HEAD_DIM = 256
PIECE_NUMBERS = 2048  # of dQ that leave at a time
FEW_REGISTERS = (112, 152, 96)  # where a thread of reduce holds 64 numbers


@dataclass(frozen=True)
class WideTmemMap(TmemMap):
    """Columns of tensor memory where a step has 64 queries; see ``TmemMap``.

    dQ lies transposed, head dims in lanes: 128 of them and all queries are 64 columns. It has columns of its own where
    there are so many, else it begins over dP.

    Attributes:
        v_columns: of V, two values each, where it is kept here.
    """

    v_columns: int = 0

    def dp(self) -> int:
        """First column of dP."""
        return PANEL

    @property
    def dq_columns(self) -> int:
        """Columns of dQ."""
        return -(-self.tile_d // ROWS) * PANEL

    @property
    def shares(self) -> bool:
        """Whether dQ begins over dP."""
        kept = self.tile_d + self.tile_dv + self.v_columns
        return 2 * PANEL + self.dq_columns + kept > TMEM_COLUMNS

    def dq(self) -> int:
        """First column of dQ."""
        return self.dp() if self.shares else 2 * PANEL

    def dv(self) -> int:
        """First column of dV."""
        return max(2 * PANEL, self.dq() + self.dq_columns)

    def dk(self) -> int:
        """First column of dK."""
        return self.dv() + self.tile_dv

    def v(self) -> int:
        """First column of V."""
        return self.dk() + self.tile_d

    @property
    def columns(self) -> int:
        """Columns of all."""
        return self.v() + self.v_columns

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Name -> (first column, columns)."""
        return {
            "s": (self.s(), PANEL),
            "p": (self.s(), CHUNK + CHUNK // 2),
            "dp": (self.dp(), PANEL),
            "dq": (self.dq(), self.dq_columns),
            "dv": (self.dv(), self.tile_dv),
            "dk": (self.dk(), self.tile_d),
            **({"v": (self.v(), self.v_columns)} if self.v_columns else {}),
        }

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Names that share columns."""
        return (("s", "p"), ("dp", "dq")) if self.shares else (("s", "p"),)


@dataclass(frozen=True)
class WideBackwardConfig(BackwardConfig):
    """Compile-time facts of one wide Blackwell backward kernel: those of ``BackwardConfig``, and one more.

    Attributes:
        splits: CTAs that each have so many of the columns of a tile's dQ, dK and dV: where tensor memory does not hold them
            all. Each multiplies all of S and dP, and none waits for the other. With two, V is kept in tensor memory.
    """

    splits: int = 1

    dq_lanes = 0
    dq_turned = True  # sums of dQ lie as lanes of tensor memory have dQ^T

    def __post_init__(self):
        self.check_mods()
        for name, least in (("tile_d", ROWS), ("tile_dv", COLUMN_STEP)):
            size = getattr(self, name)
            if size % COLUMN_STEP or not least <= size <= MAX_HEAD_DIM:
                raise ValueError(
                    f"{name} is {size}; supported are multiples of {COLUMN_STEP} from {least} to {MAX_HEAD_DIM}"
                )
        if self.ctas != 1:
            raise ValueError(f"ctas is {self.ctas}: pairs are not built for head dims above 128")
        if self.splits not in (1, 2):
            raise ValueError(f"splits is {self.splits}; supported are 1 and 2")
        if self.splits == 2 and (self.tile_d != MAX_HEAD_DIM or self.tile_dv % ROWS):
            raise ValueError(
                f"splits is 2 with head dims {self.tile_d, self.tile_dv}: it takes {MAX_HEAD_DIM}, and {ROWS} or {MAX_HEAD_DIM}"
            )
        if self.tmem.columns > TMEM_COLUMNS:
            raise ValueError(
                f"{self.tmem.columns} columns of tensor memory for head dims {self.tile_d, self.tile_dv} in {self.splits} parts; "
                f"there are {TMEM_COLUMNS}"
            )
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")

    @property
    def tile_m(self) -> int:
        """Queries per step: S, dP and dQ have room beside dK and dV."""
        return PANEL

    @property
    def tmem(self) -> WideTmemMap:
        """Map of tensor memory."""
        return WideTmemMap(self.part_d, self.part_dv, 1, self.tile_dv // 2 if self.keeps_v else 0)

    @property
    def keeps_v(self) -> bool:
        """Whether V is kept in tensor memory: it comes by halves through a buffer, which dV leaves through."""
        return self.splits > 1

    @property
    def v_bytes(self) -> int:
        """Bytes of a CTA's values, or of the part of their columns that comes at a time."""
        return ROWS * self.part_dv * ELEMENT_BYTES

    @property
    def panels(self) -> int:
        """Panels of dS."""
        return 1

    @property
    def order_of_sums(self) -> dict[str, int]:
        """What ``FinishConfig`` must know of how sums of dQ lie."""
        return {"dq_turned": True}

    @property
    def dq_accumulators(self) -> tuple[tuple[int, int], ...]:
        """(first head dim of a CTA's own, head dims) of each of the products that make dQ^T."""
        firsts = range(0, self.part_d, ROWS)
        return tuple((first, min(ROWS, self.part_d - first)) for first in firsts)

    def start_of(self, name: str, split) -> tuple[str, object]:
        """(buffer, byte of the first column) of an operand of dQ, dK or dV that is read by columns; dual-mode."""
        if name.startswith("kt"):
            buffer, rows, width = "k", ROWS, self.part_d
            first, _ = self.dq_accumulators[int(name.removeprefix("kt"))]
        else:
            buffer, width = {"qt": ("q", self.part_d), "dot": ("do", self.part_dv)}[name]
            rows, first = self.tile_m, 0
        return buffer, (split * width + first) * (rows * ELEMENT_BYTES)

    @property
    def dq_steps(self) -> int:
        """Pieces in which dQ leaves."""
        return self.part_d * PANEL // PIECE_NUMBERS

    @property
    def dq_floats(self) -> int:
        """Numbers of such a piece."""
        return PIECE_NUMBERS

    @property
    def dq_columns(self) -> int:
        """Queries of a piece, where all lanes have some of it."""
        return PIECE_NUMBERS // ROWS

    def _rings(self, roles) -> tuple[Ring, ...]:
        """Of one CTA; V that is kept is read by ``compute``."""
        rings = super()._rings(roles)
        if not self.keeps_v:
            return rings
        compute = roles["compute"]
        v = Ring("v", compute, 1, self.v_bytes, freed_by=compute)
        return tuple(v if ring.name == "v" else ring for ring in rings)

    def _signals(self, **roles) -> tuple[Signal, ...]:
        """Of one CTA; ``vt`` tells that V is in tensor memory."""
        signals = super()._signals(**roles)
        if not self.keeps_v:
            return signals
        return (*signals, Signal("vt", roles["compute"], (roles["mma"],), THREADS, ("dk",)))

    @property
    def run(self) -> int:
        """See ``BackwardConfig``: all without mods; a score_mod's by two runs at least, which hides the first P from the second."""
        changed, crowded = self.alibi or self.softcap, self.part_d > ROWS
        if self.has_mods and crowded and (self.aux or changed):
            return self.queries // 4
        if self.score_mod or self.has_mods and (self.aux or changed):
            return self.queries // 2
        return self.queries

    @property
    def _registers(self) -> tuple[int, int, int]:
        """Of reduce, compute and the others; a thread of compute has 32 queries of a step: features need no more."""
        return REGISTERS if self.part_d > ROWS else FEW_REGISTERS

    def bounds(self) -> dict[str, int]:
        """As of ``BackwardConfig``, for the steps of all ``splits`` CTAs."""
        d, dv, m = self.part_d, self.part_dv, self.tile_m
        products = 2 * ROWS * m * (self.tile_d + self.tile_dv + d + dv)
        products += 2 * ROWS * m * ROWS * len(self.dq_accumulators)  # 64 rows take as long as 128
        s = (ROWS + m) * (self.tile_d + self.tile_dv)  # keys, and queries
        if self.keeps_v:
            s -= ROWS * self.tile_dv
        sums = m * dv + m * d + ROWS * m  # B of dV and dK; dS as A of dK
        dq = ROWS * d + ROWS * m * len(self.dq_accumulators)
        elements = s + sums + dq + ROWS * m
        outs = 2 * FLOAT_BYTES * m * d
        return {
            "tensor cores": self.splits * products // MMA_FLOPS,
            "shared memory": self.splits * (ELEMENT_BYTES * elements + outs) // SMEM_CYCLES,
            "exponentials": self.splits * ROWS * m // EXPONENTIALS,
        }


def can_implement(problem) -> str | None:
    """Why this kernel cannot run the backward of a problem, or None if it can."""
    obstacle = lacks_derivative(problem)
    if obstacle is not None:
        return obstacle
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"takes {name} up to {MAX_HEAD_DIM}, not {size}"
    return None


def padded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int, int]:
    """(tile_d, tile_dv, splits): multiples of 64 and one CTA where tensor memory holds dQ, dK and dV, else of 128 and two."""
    tile_d, tile_dv = (-(-size // COLUMN_STEP) * COLUMN_STEP for size in (head_dim, head_dim_v))
    tile_d = max(tile_d, ROWS)
    if WideTmemMap(tile_d, tile_dv, 1).columns <= TMEM_COLUMNS:
        return tile_d, tile_dv, 1
    return MAX_HEAD_DIM, -(-tile_dv // ROWS) * ROWS, 2


def choose_config(problem) -> tuple[WideBackwardConfig, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    tile_d, tile_dv, splits = padded_head_dims(problem.head_dim, problem.head_dim_v)
    config = WideBackwardConfig(
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
        splits=splits,
        **fields_of_mods(problem),
    )
    if splits == 1:
        shared = f"one CTA for each tile: dK and dV take {tile_d + tile_dv} of {TMEM_COLUMNS} columns of tensor memory, which leaves room for 64 queries"
    else:
        shared = (
            f"two CTAs for each tile, with half of the columns of dQ, dK and dV each: all of dK and dV would be {tile_d + tile_dv} "
            f"of {TMEM_COLUMNS} columns of tensor memory. Both multiply all of S and dP: 7 products for 5"
        )
    cycles = ", ".join(f"{unit} {n}" for unit, n in config.bounds().items())
    reasons = [shared, f"cycles of a step of 64 queries at least, of all its CTAs: {cycles}"]
    if config.keeps_v:
        reasons.append(
            "V is kept in tensor memory, where dP reads it: two slots of Q have room in shared memory, whose traffic is the limit"
        )
    if config.ordered:
        reasons.append(
            "tiles add to dQ in the order of their numbers, which each CTA takes in ascending order"
        )
    return config, tuple(reasons)
