"""Configuration of the Blackwell backward: every compile-time fact, and the graph that follows from it. DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.geometry import QueryBlocks
from flash4.common.launch_facts import BackwardLaunch
from flash4.common.mod_facts import ModFacts, fields_of_mods, has_mods, lacks_derivative
from flash4.sm100.bwd_graph import BYTES, ROWS, Graph, Ring, Signal, TmemMap
from flash4.sm100.fwd_config import COLUMN_STEP, ELEMENT_BYTES, SMEM_LIMIT, padded_head_dim
from flash4.sm100.fwd_graph import LEADER, THREADS, UMMA, Buffer, Role

FLOAT_BYTES = 4
TILE_BYTES = 128  # where a CTA's only tile lies, of sequences of different lengths
TILE_M = ROWS  # queries of a step: columns of S^T, and rows of dQ
MAX_HEAD_DIM = 128
PAIRED_DIM = 128  # halves of Q, dO and K are one group of columns under the swizzle
PANEL = 64  # queries of a panel of dS
Q_STAGES = 2
STAT_STAGES = 2
DQ_STAGES = 2  # of the way out of dQ
DQ_COLUMNS = 32  # of dQ that leave at a time; half of it in a pair
REGISTERS = (144, 144, 80)  # reduce, compute, the others: ptxas spills least with these
SMALL_REGISTERS = (96, 168, 80)  # where a lane of dQ has 64 columns
FEATURE_REGISTERS = (144, 152, 64)  # windows and slopes, where a lane of dQ has 128
CROWDED_REGISTERS = (144, 160, 48)  # the same of sequences
PAIR_REGISTERS = (136, 136, 104)
NARROW_REGISTERS = (96, 184, 48)  # windows, slopes and caps, where a lane of dQ has 64 columns
TURN_HEADS = 32  # of a section at least: more would read too much anew from memory
TURN_GROUP = 4  # tiles of a head at the same time
SMEM_CYCLES = 128  # bytes that an SM's shared memory moves per cycle
MMA_FLOPS = 8192  # dense 16-bit tensor operations of an SM per cycle
EXPONENTIALS = 16  # of an SM per cycle


@dataclass(frozen=True)
class BackwardConfig(ModFacts, BackwardLaunch):
    """Compile-time facts of one Blackwell backward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and gradients; float16 otherwise.
        tile_d: head dim of Q, K, dQ and dK, padded (TMA fills with zeros).
        tile_dv: head dim of V, dO and dV, padded.
        causal: bottom-right causal mask.
        ctas: CTAs that work on a tile of keys together: 1, or a pair, each with 128 of its 256 keys. Each loads half of Q
            and dO, and has dQ of half of the queries, for which it needs the peer's dS of them.
        left: a window limits the keys before a query's own position; its side is a run-time value.
        right: a window limits the keys after it, and lets some through (none is ``causal``).
        softcap: scores are capped; the cap is a run-time value.
        alibi: scores lose a slope of their head times the distance between query and key.
        ordered: tiles add to dQ in a fixed order, so that it is bitwise repeatable. All CTAs of the launch must be
            on the GPU at the same time.
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
    causal: bool
    ctas: int = 1
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
        dims = (self.tile_d, self.tile_dv)
        if any(d not in (COLUMN_STEP, 2 * COLUMN_STEP) for d in dims):
            raise ValueError(f"head dims of a tile are {dims}; supported are 64 and 128")
        if self.ctas not in (1, 2) or self.ctas == 2 and dims != (PAIRED_DIM, PAIRED_DIM):
            raise ValueError(
                f"ctas is {self.ctas} with head dims {dims}: 1, or 2 where both are {PAIRED_DIM}"
            )
        if self.ctas == 2 and self.varlen:
            raise ValueError("a pair with sequences of different lengths is not built")
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")

    chained = True  # kernels are launched before the one before has ended
    negates = True  # statistics come as -LSE and -D, to be added
    keeps_v = False  # V stays in shared memory

    @property
    def tile_m(self) -> int:
        """Queries per step."""
        return TILE_M

    @property
    def part_d(self) -> int:
        """Columns of dQ and dK of a CTA, or pair."""
        return self.tile_d // self.splits

    @property
    def part_dv(self) -> int:
        """Columns of dV of a CTA, or pair."""
        return self.tile_dv // self.splits

    @property
    def query_parts(self) -> int:
        """Parts of a step's queries of which a thread of ``compute`` has 32 columns each."""
        return self.tile_m // PANEL

    @property
    def queries(self) -> int:
        """Queries of a step, of a thread of ``compute``."""
        return self.tile_m // 2

    @property
    def q_stages(self) -> int:
        """Slots of Q; of one CTA two: dK reads Q of a step while S of the next is multiplied."""
        return Q_STAGES if self.ctas == 1 else 1

    @property
    def stat_bytes(self) -> int:
        """Bytes of LSE and D of a step's queries."""
        return 2 * self.tile_m * FLOAT_BYTES

    @property
    def tmem(self) -> TmemMap:
        """Map of tensor memory."""
        return TmemMap(self.tile_d, self.tile_dv, self.ctas)

    @property
    def tile_n(self) -> int:
        """Keys per tile."""
        return ROWS * self.ctas

    @property
    def counts_workers(self) -> bool:
        """CTAs stay, but of sequences of different lengths each finds its only tile."""
        return not self.varlen

    @property
    def least_heads(self) -> int:
        """See ``BackwardLaunch``; where tiles of a head wait for one another at the diagonal, few of them at the same time."""
        return TURN_HEADS if self.causal and self.ordered else super().least_heads

    def blocks(self, left=None, right=None) -> QueryBlocks:
        """See ``BackwardLaunch``; where tiles of a head wait for one another at the diagonal, every other group of them descends.

        A group is a wave. Tiles of an ascending one begin a step one after the other, and end together, since each is a
        step shorter than the last; those of a descending one begin together, and end one after the other.
        """
        visits = super().blocks(left, right)
        grouped = self.causal and self.ordered and not (self.left or self.varlen)
        return replace(visits, group=TURN_GROUP) if grouped else visits

    @property
    def order_of_sums(self) -> dict[str, int]:
        """Sums of dQ lie as lanes of tensor memory have them."""
        return {"dq_lanes": self.dq_lanes}

    @property
    def dq_lanes(self) -> int:
        """Sums of dQ lie as lanes of tensor memory have them: of one CTA, or of a pair."""
        return self.ctas

    @property
    def k_bytes(self) -> int:
        """Bytes of a CTA's keys."""
        return ROWS * self.tile_d * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """Bytes of a CTA's values."""
        return ROWS * self.tile_dv * ELEMENT_BYTES

    @property
    def q_bytes(self) -> int:
        """Bytes of a CTA's part of a step's queries."""
        return self.tile_m * self.tile_d * ELEMENT_BYTES // self.ctas

    @property
    def do_bytes(self) -> int:
        """Bytes of a CTA's part of a step's gradients of out."""
        return self.tile_m * self.tile_dv * ELEMENT_BYTES // self.ctas

    @property
    def panel_bytes(self) -> int:
        """Bytes of dS of 64 queries and a CTA's keys."""
        return ROWS * PANEL * ELEMENT_BYTES

    @property
    def panels(self) -> int:
        """Panels of dS: of both halves of the queries; in a pair of both CTAs' keys for a CTA's own 64, and the one
        that goes to the peer."""
        return 2 if self.ctas == 1 else 3

    @property
    def dq_columns(self) -> int:
        """Columns of a lane of dQ that leave at a time."""
        return DQ_COLUMNS // self.ctas

    @property
    def dq_steps(self) -> int:
        """Parts in which dQ leaves."""
        return self.tile_d // self.ctas // self.dq_columns

    @property
    def dq_floats(self) -> int:
        """Numbers of such a part."""
        return ROWS * self.dq_columns

    @property
    def wide(self) -> bool:
        """A lane of dQ has 128 columns, which ``reduce`` holds: registers that ``compute`` has not."""
        return self.tile_d // self.ctas > COLUMN_STEP

    @property
    def run(self) -> int:
        """Queries of a step whose scores a thread of ``compute`` works on at a time: all, unless registers would spill."""
        changed, crowded = self.alibi or self.softcap, self.wide and (self.varlen or self.has_mods)
        if self.aux or changed and self.has_mods:
            return self.queries // 8 if crowded else self.queries // 4
        if self.alibi and self.softcap:
            return self.queries // 4 if crowded else self.queries // 2
        if self.score_mod or crowded and (self.alibi or self.mask_mod):
            return self.queries // 2
        return self.queries

    @property
    def fits(self) -> bool:
        """Whether one CTA's shared memory holds the kernel."""
        return self.graph.smem_bytes <= SMEM_LIMIT

    @property
    def _registers(self) -> tuple[int, int, int]:
        """Of reduce, compute and the others; ptxas spills least with these."""
        changed = self.alibi or self.softcap or self.has_mods
        if not (changed or self.left or self.right or self.varlen):
            if self.ctas == 2:
                return PAIR_REGISTERS
            return REGISTERS if self.wide else SMALL_REGISTERS
        if not self.wide:
            return NARROW_REGISTERS
        return CROWDED_REGISTERS if self.varlen else FEATURE_REGISTERS

    @property
    def graph(self) -> Graph:
        """Roles, rings, signals and memory."""
        outs, soft, others = self._registers
        names = {"mma": 12, "load": 13} | ({"relay": 14} if self.ctas == 2 else {})
        roles = {
            "reduce": Role("reduce", range(0, 4), outs),
            "compute": Role("compute", range(4, 12), soft),
            **{name: Role(name, range(at, at + 1), others) for name, at in names.items()},
        }
        pair = self.ctas == 2
        rings = self._pair_rings(roles) if pair else self._rings(roles)
        sizes = {"k": self.k_bytes, "v": self.v_bytes}
        if pair:
            q, do = self.q_bytes, self.do_bytes
            sizes |= {"kt": self.k_bytes, "q": q, "qt": q, "do": do, "dot": do}
        else:
            sizes |= {"q": self.q_stages * self.q_bytes, "do": self.do_bytes}
        sizes |= {
            "ds": self.panels * self.panel_bytes,
            "dq": DQ_STAGES * self.dq_floats * FLOAT_BYTES,
            "stat": STAT_STAGES * self.stat_bytes,
        }
        if self.varlen:
            sizes["tile"] = TILE_BYTES
        return Graph(
            roles=tuple(roles.values()),
            rings=rings,
            signals=self._pair_signals(**roles) if pair else self._signals(**roles),
            buffers=tuple(Buffer(name, nbytes) for name, nbytes in sizes.items()),
            tmem=self.tmem,
            ctas=self.ctas,
        )

    def _rings(self, roles) -> tuple[Ring, ...]:
        """Of one CTA; ``docs/kernels/sm100-bwd.md`` says why each cover holds."""
        mma, compute = roles["mma"], roles["compute"]
        return (
            Ring("k", mma, 1, self.k_bytes, freed_by=compute),
            Ring("v", mma, 1, self.v_bytes, covered_by=("k empty", "dk")),
            Ring("q", mma, self.q_stages, self.q_bytes, freed_by=UMMA),
            Ring("do", mma, 1, self.do_bytes, freed_by=UMMA),
            Ring(
                "stat",
                compute,
                STAT_STAGES,
                self.stat_bytes,
                covered_by=("q empty", "ds"),
                shared=False,
            ),
        )

    def _pair_rings(self, roles) -> tuple[Ring, ...]:
        """Of a pair: a is dO^T of a step and Q of the next one, b is Q^T of a step and dO of the next one."""
        mma, compute = roles["mma"], roles["compute"]
        q_bytes = self.q_bytes + self.do_bytes
        return (
            Ring("k", mma, 1, self.k_bytes, freed_by=compute),
            Ring("v", mma, 1, self.v_bytes, covered_by=("k empty", "dk")),
            Ring("kt", mma, 1, self.k_bytes, covered_by=("k empty", "dk")),
            Ring("a", mma, 1, q_bytes, covered_by=("s", "k empty", "dk")),
            Ring("b", mma, 1, q_bytes, covered_by=("dp", "k empty", "dk")),
            Ring(
                "stat", compute, STAT_STAGES, self.stat_bytes,
                covered_by=("dp", "dst", "k empty"), shared=False,
            ),
        )  # fmt: skip

    @staticmethod
    def _signals(reduce, compute, mma, load) -> tuple[Signal, ...]:
        """Of one CTA."""
        of_tile = ("k full", "k empty")
        return (
            Signal("s", mma, (compute,), UMMA, ("p",)),
            Signal("p", compute, (mma,), THREADS, ("s",)),
            Signal("dp", mma, (compute,), UMMA, ("ds",)),
            Signal("ds", compute, (mma,), THREADS, ("dp",)),
            Signal("dq", mma, (reduce,), UMMA, ("r",)),
            Signal("r", reduce, (mma,), THREADS, ("dq",), late=(mma,)),
            Signal("dv", mma, (compute,), UMMA, of_tile),
            Signal("dk", mma, (compute,), UMMA, of_tile),
        )

    @staticmethod
    def _pair_signals(reduce, compute, mma, load, relay) -> tuple[Signal, ...]:
        """Of a pair."""
        of_tile = ("k full", "k empty")
        return (
            Signal("s", mma, (compute, load), UMMA, ("p", "a full")),
            Signal("early", compute, (mma,), LEADER, ("s",)),
            Signal("p", compute, (mma,), LEADER, ("s",)),
            Signal("dp", mma, (compute, load), UMMA, ("dst", "b full")),
            Signal("dst", compute, (mma,), LEADER, ("dp",)),
            Signal("ds", compute, (relay,), THREADS, ("y", "dq")),
            Signal("x", relay, (relay,), BYTES, ("ds", "y", "dq")),
            Signal("y", relay, (mma,), LEADER, ("ds", "dq")),
            Signal("dq", mma, (reduce, compute), UMMA, ("r", "ds", "y"), late=(compute,)),
            Signal("r", reduce, (mma,), LEADER, ("dq",), late=(mma,)),
            Signal("dv", mma, (compute,), UMMA, of_tile),
            Signal("dk", mma, (compute,), UMMA, of_tile),
        )

    def bounds(self) -> dict[str, int]:
        """Cycles of a step that each unit of an SM needs at least, by its rate.

        Shared memory: operands of the five products, dS on its way in, and to the peer, dQ on its way in and out.
        """
        d, dv, ctas = self.tile_d, self.tile_dv, self.ctas
        products = 2 * ROWS * TILE_M * (3 * d + 2 * dv)
        s = ROWS * (d + dv) + TILE_M * (d + dv) // ctas  # S and dP: keys, and queries
        sums = TILE_M * dv // ctas + TILE_M * d // ctas  # B of dV and dK
        if ctas == 1:
            sums += ROWS * TILE_M  # dS as A of dK
        dq = (
            ROWS * TILE_M + ROWS * d
        )  # A and B; in a pair half of the rows of A and of B, of twice the keys
        exchanged = 0 if ctas == 1 else ROWS * TILE_M  # half of dS, read and written
        elements = s + sums + dq + ROWS * TILE_M + exchanged
        outs = 2 * FLOAT_BYTES * TILE_M * d // ctas
        return {
            "tensor cores": products // MMA_FLOPS,
            "shared memory": (ELEMENT_BYTES * elements + outs) // SMEM_CYCLES,
            "exponentials": ROWS * TILE_M // EXPONENTIALS,
        }


def can_implement(problem) -> str | None:
    """Why this kernel cannot run the backward of a problem, or None if it can."""
    obstacle = lacks_derivative(problem)
    if obstacle is not None:
        return obstacle
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"takes {name} up to {MAX_HEAD_DIM}, not {size}: S, dP, dV and dK of 128 keys fill tensor memory"
    return None


def choose_config(problem) -> tuple[BackwardConfig, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    tile_d, tile_dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    if (problem.softcap or has_mods(problem)) and tile_d == PAIRED_DIM and not problem.varlen:
        tile_dv = PAIRED_DIM  # a pair has more registers for compute
    fields = {
        "bf16": problem.dtype == torch.bfloat16,
        "tile_d": tile_d,
        "tile_dv": tile_dv,
        "causal": problem.causal,
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
    ctas, why_ctas = choose_ctas(problem, fields)
    config = BackwardConfig(ctas=ctas, **fields)
    cycles = ", ".join(f"{unit} {n}" for unit, n in config.bounds().items())
    reasons = [why_ctas, f"cycles of a step of 128 queries at least: {cycles}"]
    reasons.append("exponentials on the special function unit alone: it is not the limit")
    if config.ordered:
        reasons.append(
            "tiles add to dQ in the order of their numbers, which each CTA takes in ascending order"
        )
    return config, tuple(reasons)


def choose_ctas(problem, fields: dict) -> tuple[int, str]:
    """CTAs that work on a tile, and the reason: a pair where it moves fewer bytes of shared memory and is not mostly masked."""
    if (fields["tile_d"], fields["tile_dv"]) != (PAIRED_DIM, PAIRED_DIM):
        return 1, "one CTA: halves of head dims below 128 are not built"
    if problem.varlen:
        return 1, "one CTA: pairs are not built for sequences of different lengths"
    if fields["softcap"] or has_mods(problem):
        what = "the cap" if fields["softcap"] else "mods"
        return 2, f"a pair of CTAs: its reduce holds half of dQ, which leaves registers for {what}"
    if fields["left"] or fields["right"]:
        return 1, "one CTA: 256 keys of a pair would see more of what a window hides"
    alone, pair = (BackwardConfig(ctas=ctas, **fields).bounds() for ctas in (1, 2))
    limits = max(alone.values()), max(pair.values())
    pairs, tiles = -(-problem.seqlen_k // (2 * ROWS)), -(-problem.seqlen_k // ROWS)
    work = [
        limits[0] * _steps(problem, tiles, ROWS),
        limits[1] * _steps(problem, pairs, 2 * ROWS) * 2,
    ]
    why = f"{limits[1]} cycles a step and CTA against {limits[0]}, {work[1] / work[0]:.2f} of the time by the model"
    if work[1] < work[0]:
        return 2, f"a pair of CTAs: {why}"
    return 1, f"one CTA: a pair would take {why}"


def _steps(problem, tiles: int, tile_n: int) -> int:
    """Steps of all tiles of a head."""
    blocks = QueryBlocks(TILE_M, tile_n, problem.causal)
    return sum(max(blocks.count(n, problem.seqlen_q, problem.seqlen_k), 1) for n in range(tiles))
