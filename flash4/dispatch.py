"""From a problem to a plan: which kernel, in which configuration, and why not the others. DSL-free."""

from dataclasses import dataclass, replace

from flash4.common.geometry import KvBlocks, ceil_div
from flash4.common.kv_tiles import KvGrid, KvTileSchedule, kv_grid_of, slots_of
from flash4.common.tiles import Grid, TileSchedule, grid_of, multiprocessors_for, workers_of
from flash4.passes.bwd_config import WHOLE, WholeConfig
from flash4.problem import AttentionProblem
from flash4.sm80 import bwd_config as sm80_bwd
from flash4.sm80 import fwd_config as sm80_fwd
from flash4.sm90 import bwd_192_config as sm90_bwd_192
from flash4.sm90 import bwd_config as sm90_bwd
from flash4.sm90 import bwd_wide_config as sm90_bwd_wide
from flash4.sm90 import fwd_config as sm90_fwd
from flash4.sm100 import bwd_config as sm100_bwd
from flash4.sm100 import bwd_wide_config as sm100_bwd_wide
from flash4.sm100 import fwd_config as sm100_fwd


def _ampere_rows(name: str, kernel: str, module) -> tuple:
    """Rows of an Ampere kernel for each target, with what a card of that kind holds."""
    cards = {
        "sm_80": module.A100,
        "sm_86": module.SMALL,
        "sm_87": module.A100,
        "sm_89": module.SMALL,
        "sm_90": module.HOPPER,
        "sm_120": module.CONSUMER_BLACKWELL,
        "sm_121": module.CONSUMER_BLACKWELL,
    }
    return tuple((name, kernel, target, card) for target, card in cards.items())


# Every kernel: name, "module:class", architecture, module with can_implement(problem) and choose_config(problem). One that is
# compiled for several architectures has a row for each.
FORWARD_KERNELS = (
    ("sm90-fwd", "flash4.sm90.fwd:ForwardSm90", "sm_90a", sm90_fwd),
    ("sm100-fwd", "flash4.sm100.fwd:ForwardSm100", "sm_100a", sm100_fwd),
    ("sm100-fwd", "flash4.sm100.fwd:ForwardSm100", "sm_103a", sm100_fwd.SM103),
    ("sm100-fwd", "flash4.sm100.fwd:ForwardSm100", "sm_110a", sm100_fwd),
    *_ampere_rows("sm80-fwd", "flash4.sm80.fwd:ForwardSm80", sm80_fwd),
)
BACKWARD_KERNELS = (
    ("sm100-bwd", "flash4.sm100.bwd:BackwardSm100", "sm_100a", sm100_bwd),
    ("sm100-bwd", "flash4.sm100.bwd:BackwardSm100", "sm_103a", sm100_bwd),
    ("sm100-bwd", "flash4.sm100.bwd:BackwardSm100", "sm_110a", sm100_bwd),
    *(
        ("sm100-bwd-wide", "flash4.sm100.bwd_wide:WideBackwardSm100", target, sm100_bwd_wide)
        for target in ("sm_100a", "sm_103a", "sm_110a")
    ),
    ("sm90-bwd", "flash4.sm90.bwd:BackwardSm90", "sm_90a", sm90_bwd),
    ("sm90-bwd-192", "flash4.sm90.bwd_192:Backward192Sm90", "sm_90a", sm90_bwd_192),
    ("sm90-bwd-wide", "flash4.sm90.bwd_wide:WideBackwardSm90", "sm_90a", sm90_bwd_wide),
    *_ampere_rows("sm80-bwd", "flash4.sm80.bwd:BackwardSm80", sm80_bwd),
)
# Compute capability -> compile target. sm_90 is for tests: it gets Ampere kernels, which serve what has none of its own.
ARCHITECTURES = {
    (9, 0): "sm_90a",
    **{(a, b): f"sm_{a}{b}" for a, b in ((8, 0), (8, 6), (8, 7), (8, 9), (12, 0), (12, 1))},
}
# Kernels compile and are simulated, but nobody has run one.
NEVER_RUN = {(10, 0): "Blackwell", (10, 3): "Blackwell Ultra", (11, 0): "Blackwell (Thor)"}

L2_BYTES = 24 << 20  # of K and V that stay in L2 while a section runs; measured by HBM traffic
HBM_BYTES, CALL_FLOPS = 4.2e12, 7e14  # of an H200, per second; a rough guess will do
HBM_WEIGHT = 0.2  # time lost per share of HBM's bandwidth that a call takes: power, above all
SECTION_BYTES = 20 << 20  # of K and V that surely stay there
CAUSAL_SECTION_BYTES = 26 << 20  # the same of tiles that need less and less of them
SEQUENCE_SECTION_BYTES = 16 << 20  # of a section where tiles of sequences are handed out
TIMES_SPREAD = 0.01  # of equal tiles: what would balance by chance alone does not count
USUAL_WINDOW = 1024  # keys that a window is taken to show a query at its left
MIN_SECTION = 3  # fewer heads at a time, and too many workers read the same lines of L2
MAX_TILES = 2**31 - 1  # tile numbers are int32 in the kernel
MODELLED_TILES = 16_384  # beyond that the last wave does not matter
MODELLED_SECTIONS = 32


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

    def multiprocessors_of(self, multiprocessors: int) -> int:
        """How many of a GPU's multiprocessors the kernel is launched for."""
        if not tiles_are_equal(self.problem):
            return multiprocessors
        return multiprocessors_for(self.grid.total, multiprocessors, self.config.ctas)

    def schedule(self, multiprocessors: int, left=None, right=None) -> TileSchedule:
        """Tile schedule on a GPU with ``multiprocessors``, as the kernel runs it; sides of the window.

        If the config hands tiles out, ``TileSchedule.handed_out`` says how.
        """
        p, blocks = self.problem, self.config.blocks(left, right)
        if p.varlen:
            raise ValueError(
                "lengths of sequences are known on the GPU only: tiles are handed out there"
            )
        workers = workers_of(self.multiprocessors_of(multiprocessors), self.config.ctas)
        workers = min(workers, self.grid.total)
        return TileSchedule(blocks, self.grid, self.section, 0, workers, p.seqlen_q, p.seqlen_k)

    def __str__(self):
        p = self.problem
        lines = [
            f"{self.name} for {self.arch}: {_summary(p)}",
            f"  {self.config}",
            f"  about {self.grid.total} tiles of {self.config.tile_q} queries, handed out one by one"
            if p.varlen
            else f"  {self.grid.total} tiles of {self.config.tile_q} queries, {self.section} heads per section"
            + (", handed out one by one" if self.config.handed_out else ""),
        ]
        return "\n".join([*lines, *_explanations(self)])


def _summary(p: AttentionProblem) -> str:
    return (
        f"batch {p.batch}, queries {p.seqlen_q}, keys {p.seqlen_k}, "
        f"heads {p.heads_q}/{p.heads_kv}, head dim {p.head_dim}/{p.head_dim_v}, "
        f"{str(p.dtype).removeprefix('torch.')}{''.join(f', {name}' for name in p.features)}"
    )


def _explanations(plan) -> list[str]:
    lines = [f"  because {reason}" for reason in plan.reasons]
    lines += [f"  not {name}: {reason}" for name, reason in plan.rejected]
    if plan.arch not in ARCHITECTURES.values():
        lines.append("  not yet run on silicon: launched by `python -m flash4 selftest` alone")
    return lines + ([f"  copies {copy}" for copy in plan.copies] or ["  copies nothing"])


@dataclass(frozen=True)
class BackwardPlan:
    """How the backward of a call will run: three kernels, one after the other, from one launch. ``print(plan)`` explains it.

    Attributes:
        problem: facts of the call.
        name: short name of the main kernel.
        kernel: its class as ``"module:class"``.
        arch: target architecture.
        config: its compile-time configuration.
        dlse: the log-sum-exp has a gradient.
        grid: extent of the work in tiles of keys.
        section: heads whose tiles run together; of sequences of different lengths, tiles.
        reasons: why this kernel and this configuration.
        rejected: (name, reason) of the kernels that were not taken.
        copies: what is copied before the launch, and why.
    """

    problem: AttentionProblem
    name: str
    kernel: str
    arch: str
    config: object
    dlse: bool
    grid: KvGrid
    section: int
    reasons: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def kernels(self) -> tuple[tuple[str, object, str], ...]:
        """(kernel, config, architecture) of what is compiled: one function that launches all."""
        return ((WHOLE, WholeConfig(self.kernel, self.config, self.dlse), self.arch),)

    @property
    def query_blocks(self) -> int:
        """Blocks of queries of each head, of all batch entries; of packed queries at most."""
        p, packed = self.problem, self.problem.cu_q
        rows = p.batch * p.seqlen_q if packed else p.seqlen_q
        return slots_of(p.batch, rows, self.config.tile_m, packed)

    @property
    def workspace_bytes(self) -> int:
        """Temporary memory, one allocation: for each query in whole blocks, dQ in float32 and two statistics; words of each
        tile of keys that is found before; counters.

        Of packed queries or keys at most so much.
        """
        blocks = self.problem.heads_q * self.query_blocks
        return 4 * self.config.workspace_numbers(blocks, self.grid.total)

    def __str__(self):
        lines = [
            f"{self.name} for {self.arch}: {_summary(self.problem)}",
            f"  {self.config}",
            f"  about {self.grid.total} tiles of {self.config.tile_n} keys, "
            f"{'found before and handed out' if self.config.tiles_found else 'each found by its CTA'}"
            if self.problem.varlen
            else f"  {self.grid.total} tiles of {self.config.tile_n} keys, {self.section} heads per section",
            f"  {'up to ' * self.problem.cu_q}{self.workspace_bytes} bytes of workspace",
        ]
        return "\n".join([*lines, *_explanations(self)])


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
        problem = f"flash4's kernels for {NEVER_RUN[capability]} ({number}) have never run on a GPU: they are not launched, but by `python -m flash4 selftest`"
    raise NotImplementedError(
        f"{problem}; supported are 9.0 (Hopper: H100, H200, GH200), 8.0 to 8.9 (Ampere, Ada), 12.0 and 12.1"
    )


def serve(capability: tuple[int, int], arch: str):
    """Let this process run kernels of another target on GPUs of a compute capability; for tests and benchmarks.

    Args:
        capability: such as (9, 0), for which nothing may have been launched yet.
        arch: such as "sm_90", which is Ampere's kernels on Hopper.
    """
    ARCHITECTURES[capability] = arch


def allow_untried(capability: tuple[int, int]):
    """Let this process launch kernels that nobody has run on a GPU yet; for the selftest alone.

    Raises:
        ValueError: there are none for this compute capability.
    """
    if capability not in NEVER_RUN:
        raise ValueError(f"no kernels for {capability[0]}.{capability[1]} wait for their first run")
    ARCHITECTURES[capability] = f"sm_{capability[0]}{capability[1]}a"


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
    (name, kernel, module), rejected = _choose_kernel(FORWARD_KERNELS, problem, arch)
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


def _choose_kernel(kernels, problem: AttentionProblem, arch: str):
    """Return ((name, kernel, module), rejected).

    Raises:
        NotImplementedError: none takes the problem; the message has the reason of each.
    """
    rejected, taken = [], None
    targets = {}
    for name, _, target, _ in kernels:
        targets.setdefault(name, []).append(target)
    for name, kernel, target, module in kernels:
        if target != arch:
            if arch not in targets[name] and target == targets[name][0]:
                rejected.append((name, f"runs on {', '.join(targets[name])}, not {arch}"))
            continue
        reason = module.can_implement(problem)
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
    return taken, rejected


def plan_backward(
    problem: AttentionProblem, arch: str, workers: int, dlse: bool = False
) -> BackwardPlan:
    """Choose the kernels for the backward of a problem that is not empty.

    Args:
        problem: facts of the call.
        arch: target architecture.
        workers: multiprocessors of the GPU.
        dlse: the log-sum-exp has a gradient.

    Raises:
        ValueError: the problem is empty.
        NotImplementedError: no kernel takes it; the message has the reason of each.
    """
    if problem.is_empty:
        raise ValueError("an empty problem (no batch, head, query or key) needs no kernel")
    (name, kernel, module), rejected = _choose_kernel(BACKWARD_KERNELS, problem, arch)
    config, reasons = module.choose_config(problem)
    plan = BackwardPlan(
        problem=problem,
        name=name,
        kernel=kernel,
        arch=arch,
        config=config,
        dlse=dlse,
        grid=kv_grid_of(problem, config.tile_n),
        section=backward_section(problem, config, workers),
        reasons=reasons,
        rejected=tuple(rejected),
    )
    steps = plan.query_blocks * problem.heads_q
    if max((plan.grid.total + plan.grid.n_blocks) * config.team, steps) > MAX_TILES:
        raise NotImplementedError(
            f"{plan.grid.total} tiles of keys, {steps} of queries; supported are {MAX_TILES}: split the batch"
        )
    return plan


def backward_section(problem: AttentionProblem, config, workers: int) -> int:
    """Heads per section of the backward: about a wave of tiles, which read the same queries at the same time.

    Under a causal mask more heads, whose tiles of all lengths fill the gaps; so too where tiles of one head wait for one
    another. Where no CTA takes what another leaves, as many as share the tiles out most evenly.

    Sequences of different lengths get the number of tiles: heads are counted for each of them on the GPU.
    """
    if problem.varlen:
        return workers
    grid = kv_grid_of(problem, config.tile_n)
    workers = workers_of(workers, config.team)
    blocks = config.blocks(
        USUAL_WINDOW if config.left else None, USUAL_WINDOW if config.right else None
    )
    if blocks.group:  # a wave is a group of tiles of each head
        return min(grid.head_count, max(1, workers // blocks.group))
    least = min(grid.head_count, max(1, ceil_div(workers, grid.n_blocks), config.least_heads))
    shared_out = config.counts_workers and not config.handed_out  # tiles are, before the launch
    if not (problem.causal and shared_out) or grid.total > MODELLED_TILES:
        return least
    lengths = problem.seqlen_q, problem.seqlen_k
    schedule = KvTileSchedule(blocks, grid, 1, 0, workers, *lengths)
    sizes = range(least, min(grid.head_count, least * 3 // 2) + 1)
    return min(sizes, key=lambda heads: (replace(schedule, section=heads).imbalance(), heads))


def gradient_obstacle(problem: AttentionProblem, arch: str = "sm_90a") -> str | None:
    """Why no kernel for ``arch`` gives gradients of a call, or None; the last one takes the most head dims."""
    kernels = [module for _, _, target, module in BACKWARD_KERNELS if target == arch]
    reasons = [module.can_implement(problem) for module in kernels]
    return None if None in reasons else reasons[-1]


def choose_section(problem: AttentionProblem, config, grid: Grid, workers: int) -> int:
    """Heads per section of the tile schedule: what costs least by a model of balance and of traffic to HBM.

    Without a mask all tiles cost the same, and a section of about one wave reads every K and V once: of more heads, where
    they fit L2, so that fewer workers read the same lines at the same time. So it is with a window that limits the left
    side. Without that, one that limits the right side is taken for a causal mask: its size is known at run time only.

    Sequences of different lengths get the number of keys, of one head or of several together, that a section has.
    """
    if problem.varlen:
        return SEQUENCE_SECTION_BYTES // (2 * (problem.head_dim + problem.head_dim_v))
    if tiles_are_equal(problem):
        used = multiprocessors_for(grid.total, workers, config.ctas)
        wave = ceil_div(workers_of(used, config.ctas), grid.m_blocks)
        waves = min(
            ceil_div(MIN_SECTION, wave), SECTION_BYTES // (wave * _bytes_per_head(problem, grid))
        )
        return min(grid.head_count, wave * max(1, waves))
    workers = workers_of(workers, config.ctas)
    if grid.total <= workers:
        return grid.head_count
    if config.handed_out:
        return _section_to_hand_out(problem, config, grid, workers)
    if problem.window_left:
        return min(grid.head_count, max(MIN_SECTION, ceil_div(workers, grid.m_blocks)))
    largest = min(grid.head_count, max(1, workers // MIN_SECTION))
    if grid.total > MODELLED_TILES:
        return max(1, min(largest, L2_BYTES // _bytes_per_head(problem, grid)))
    blocks = KvBlocks(config.tile_q, config.tile_n, causal=True)
    schedule = TileSchedule(blocks, grid, 1, 0, workers, problem.seqlen_q, problem.seqlen_k)
    # As many workers to each head: waves begin and end with whole heads.
    candidates = {largest} | {workers // k for k in range(MIN_SECTION, workers + 1)}

    def cost(section):
        balance = replace(schedule, section=section).imbalance()
        return balance * (1 + HBM_WEIGHT * _hbm_share(problem, grid, section, workers))

    return min((s for s in candidates if s <= largest), key=lambda s: (cost(s), -s))


def tiles_are_equal(problem: AttentionProblem) -> bool:
    """Whether all tiles visit the same number of blocks."""
    limited = problem.causal or problem.window_left or problem.window_right
    return not (problem.varlen or limited)


def _section_to_hand_out(problem: AttentionProblem, config, grid: Grid, workers: int) -> int:
    """Heads per section where tiles are handed out: what balances best of those whose K and V stay in L2.

    As even as can be: few tiles in the last section would leave workers without any.
    """
    heads, cut = grid.head_count, problem.causal or problem.window_right
    most = CAUSAL_SECTION_BYTES // _bytes_per_head(problem, grid)
    left = USUAL_WINDOW - 1 if problem.window_left else None
    if problem.window_left and cut:
        # Of a head its window is live, and what the workers that share it move on by.
        keys = SECTION_BYTES * problem.seqlen_k // _bytes_per_head(problem, grid)
        most = max(most, (keys - workers * config.tile_q) // USUAL_WINDOW)
    most = max(1, min(heads, most))
    if grid.total > MODELLED_TILES // 4:  # the end is a small part of it
        return most
    sizes = range(most, most // 4, -ceil_div(most, MODELLED_SECTIONS))
    candidates = {ceil_div(heads, ceil_div(heads, size)) for size in sizes}
    blocks = KvBlocks(config.tile_q, config.tile_n, cut, left)
    schedule = TileSchedule(blocks, grid, 1, 0, workers, problem.seqlen_q, problem.seqlen_k)

    def cost(section):
        return replace(schedule, section=section).handed_out(TIMES_SPREAD)[1]

    return min(candidates, key=lambda section: (cost(section), -section))


def _bytes_per_head(problem: AttentionProblem, grid: Grid) -> int:
    """Bytes of K and V of a head of the grid: groups of query heads share them."""
    columns = problem.head_dim + problem.head_dim_v
    return max(1, 2 * problem.seqlen_k * columns // grid.groups)


def _hbm_share(problem: AttentionProblem, grid: Grid, section: int, workers: int) -> float:
    """Share of HBM's bandwidth that K and V of a causal call take, if ``section`` heads run together.

    What fits L2 is read once. What does not is read anew by every tile, but for those at work on the same head.
    """
    nbytes, reads = grid.head_count * _bytes_per_head(problem, grid), 1.0
    if section * _bytes_per_head(problem, grid) > L2_BYTES:
        reads = max(1.0, grid.m_blocks / 2 * section / workers)
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k / 2
    seconds = 2 * pairs * (problem.head_dim + problem.head_dim_v) / CALL_FLOPS
    return nbytes * reads / seconds / HBM_BYTES
