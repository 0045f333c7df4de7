"""From a problem to a plan: which kernel, in which configuration, and why not the others. DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.geometry import KvBlocks
from flash4.common.tiles import Grid, TileSchedule, grid_of
from flash4.problem import AttentionProblem
from flash4.sm90 import fwd_config as sm90_fwd
from flash4.sm100 import fwd_config as sm100_fwd

# Every kernel: name, "module:class", architecture, module with can_implement(problem) and choose_config(problem).
FORWARD_KERNELS = (
    ("sm90-fwd", "flash4.sm90.fwd:ForwardSm90", "sm_90a", sm90_fwd),
    ("sm100-fwd", "flash4.sm100.fwd:ForwardSm100", "sm_100a", sm100_fwd),
)
ARCHITECTURES = {(9, 0): "sm_90a"}  # compute capability -> compile target
NEVER_RUN = {(10, 0): "Blackwell"}  # kernels compile and are simulated, but nobody has run one

L2_SECTION_BYTES = 32 << 20  # K and V of the heads in one section; L2 is 50 MB, on an H200 60
SEQUENCE_SECTION_BYTES = (
    16 << 20
)  # the same where tiles are handed out one by one, which loses no balance
MIN_SECTION = 3  # fewer heads at a time, and too many workers read the same lines of L2
MAX_TILES = 2**31 - 1  # tile numbers are int32 in the kernel
MODELLED_TILES = 16_384  # beyond that the last wave does not matter
MODELLED_SECTIONS = 16


@dataclass(frozen=True)
class Plan:
    """How a call will run. ``print(plan)`` explains it.

    Attributes:
        problem: facts of the call.
        name: short name of the kernel, such as ``"sm90-fwd"``.
        kernel: its class as ``"module:class"``.
        arch: target architecture, such as ``"sm_90a"``.
        config: compile-time configuration, the key of the kernel cache.
        grid: extent of the work in tiles.
        section: heads that run together, so that their K and V stay in L2; of sequences of different lengths, keys.
        reasons: why this kernel and this configuration.
        rejected: (name, reason) of the kernels that were not taken.
        copies: what is copied before the launch, and why.
    """

    problem: AttentionProblem
    name: str
    kernel: str
    arch: str
    config: object
    grid: Grid
    section: int
    reasons: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()

    def schedule(self, workers: int, left=None, right=None) -> TileSchedule:
        """Tile schedule on a GPU with ``workers`` multiprocessors, as the kernel runs it; sides of the window."""
        p, blocks = self.problem, self.config.blocks(left, right)
        if p.varlen:
            raise ValueError(
                "lengths of sequences are known on the GPU only: tiles are handed out there"
            )
        workers = min(workers, self.grid.total)
        return TileSchedule(blocks, self.grid, self.section, 0, workers, p.seqlen_q, p.seqlen_k)

    def __str__(self):
        p = self.problem
        lines = [
            f"{self.name} for {self.arch}: batch {p.batch}, queries {p.seqlen_q}, keys {p.seqlen_k}, "
            f"heads {p.heads_q}/{p.heads_kv}, head dim {p.head_dim}/{p.head_dim_v}, "
            f"{str(p.dtype).removeprefix('torch.')}{''.join(f', {name}' for name in p.features)}",
            f"  {self.config}",
            f"  about {self.grid.total} tiles of {self.config.tile_q} queries, handed out one by one"
            if p.varlen
            else f"  {self.grid.total} tiles of {self.config.tile_q} queries, {self.section} heads per section",
        ]
        lines += [f"  because {reason}" for reason in self.reasons]
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected]
        lines += [f"  copies {copy}" for copy in self.copies] or ["  copies nothing"]
        return "\n".join(lines)


def architecture(capability: tuple[int, int]) -> str:
    """Compile target for a compute capability.

    Raises:
        NotImplementedError: no kernel of flash4 runs there; the message lists where one does.
    """
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    number = f"{capability[0]}.{capability[1]}"
    problem = f"flash4 has no kernel for compute capability {number}"
    if capability in NEVER_RUN:
        problem = f"flash4's kernels for {NEVER_RUN[capability]} ({number}) have never run on a GPU: they are not launched"
    raise NotImplementedError(f"{problem}; supported is 9.0 (Hopper: H100, H200, GH200)")


def plan_forward(problem: AttentionProblem, arch: str, workers: int) -> Plan:
    """Choose the forward kernel for a problem that is not empty.

    Args:
        problem: facts of the call.
        arch: target architecture.
        workers: multiprocessors of the GPU, each of which runs one CTA at a time.

    Raises:
        ValueError: the problem is empty.
        NotImplementedError: no kernel takes it; the message has the reason of each.
    """
    if problem.is_empty:
        raise ValueError("an empty problem (no batch, head, query or key) needs no kernel")
    rejected, taken = [], None
    for name, kernel, target, module in FORWARD_KERNELS:
        reason = (
            f"runs on {target}, not {arch}" if target != arch else module.can_implement(problem)
        )
        if reason is not None:
            rejected.append((name, reason))
        elif taken is None:
            taken = (name, kernel, module)
        else:
            rejected.append((name, f"{taken[0]} comes first"))
    if taken is None:
        raise NotImplementedError(
            "no kernel can run this call: "
            + "; ".join(f"{name}: {reason}" for name, reason in rejected)
        )
    name, kernel, module = taken
    config, reasons = module.choose_config(problem)
    grid = grid_of(problem, config.tile_q, config.pack)
    tiles = grid.total
    if problem.varlen:  # each sequence, and the rows around all, may have a tile that is not full
        tiles += (problem.batch + 2) * grid.groups * grid.heads_kv
    if tiles + workers > MAX_TILES:
        raise NotImplementedError(
            f"{tiles} tiles of work; supported are {MAX_TILES}: split the batch"
        )
    return Plan(
        problem=problem,
        name=name,
        kernel=kernel,
        arch=arch,
        config=config,
        grid=grid,
        section=choose_section(problem, config, grid, workers),
        reasons=reasons,
        rejected=tuple(rejected),
    )


def choose_section(problem: AttentionProblem, config, grid: Grid, workers: int) -> int:
    """Heads per section of the tile schedule: what L2 can hold, and of that what balances best.

    A section is cheap on memory if L2 holds its K and V, or if at least three workers at a time read the same head.
    Without a mask all tiles cost the same, and a section of about one wave reads every K and V once. So it is with a
    window that limits the left side. Without that, one that limits the right side is taken for a causal mask: its size
    is known at run time only.

    Sequences of different lengths get the number of keys, of one head or of several together, that a section has.
    """
    if problem.varlen:
        return SEQUENCE_SECTION_BYTES // (2 * (problem.head_dim + problem.head_dim_v))
    if grid.total <= workers:
        return grid.head_count
    if problem.window_left or not (problem.causal or problem.window_right):
        return min(grid.head_count, max(MIN_SECTION, -(-workers // grid.m_blocks)))
    bytes_per_head = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) // grid.groups
    largest = min(grid.head_count, max(1, workers // 3, L2_SECTION_BYTES // max(1, bytes_per_head)))
    if grid.total > MODELLED_TILES:
        return largest
    step = max(1, largest // MODELLED_SECTIONS)
    blocks = KvBlocks(config.tile_q, config.tile_n, causal=True)
    schedule = TileSchedule(blocks, grid, 1, 0, workers, problem.seqlen_q, problem.seqlen_k)
    candidates = range(largest, 0, -step)
    return min(candidates, key=lambda section: replace(schedule, section=section).imbalance())
