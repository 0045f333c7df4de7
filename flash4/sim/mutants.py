"""Breaks a schedule in every small way, to see whether the simulator notices.

A mutant is the role source with one statement dropped, swapped with its neighbour, or changed by one. It is reported if
a hazard shows, the run fails, or the numbers differ. What is not reported is either harmless, for a reason that
somebody can give, or a hole in the simulator.
"""

import ast
import functools
import inspect
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from flash4.common import handout
from flash4.common.dsl import plain
from flash4.problem import CallOptions
from flash4.sim import (
    sm80_bwd,
    sm80_fwd,
    sm90_bwd,
    sm90_bwd_192,
    sm90_bwd_wide,
    sm100_bwd,
    sm100_bwd_wide,
    sm100_fwd,
)
from flash4.sim.cluster import arrive_at
from flash4.sim.machine import Hazard
from flash4.sim.rings import Ring, SharedRing
from flash4.sim.sm90_fwd import Variation, round_to_16_bit, simulate_forward
from flash4.sm80 import bwd_roles as bwd_roles_sm80
from flash4.sm80 import bwd_two_roles as bwd_two_roles_sm80
from flash4.sm80 import fwd_roles as fwd_roles_sm80
from flash4.sm80.bwd_config import OWN_KEYS, TWO_ROLES
from flash4.sm80.bwd_config import BackwardConfig as BackwardConfigSm80
from flash4.sm80.fwd_config import ForwardConfig as ForwardConfigSm80
from flash4.sm90 import (
    bwd_192_roles,
    bwd_alternate_roles,
    bwd_joint_roles,
    bwd_late_roles,
    bwd_roles,
    bwd_wide_roles,
    fwd_roles,
)
from flash4.sm90.bwd_192_config import Backward192Config
from flash4.sm90.bwd_config import BackwardConfig
from flash4.sm90.bwd_wide_config import WideBackwardConfig
from flash4.sm90.fwd_config import ForwardConfig
from flash4.sm100 import bwd_pair_roles as bwd_pair_roles_sm100
from flash4.sm100 import bwd_roles as bwd_roles_sm100
from flash4.sm100 import bwd_wide_roles as bwd_wide_roles_sm100
from flash4.sm100 import fwd_roles as fwd_roles_sm100
from flash4.sm100 import fwd_wide_roles as fwd_wide_roles_sm100
from flash4.sm100.bwd_config import BackwardConfig as BackwardConfigSm100
from flash4.sm100.bwd_wide_config import WideBackwardConfig as WideBackwardConfigSm100
from flash4.sm100.fwd_config import ForwardConfig as ForwardConfigSm100

DROPPED = {
    *("commit", "release", "open", "wait", "pass_on", "wait_mma", "wait_store"),
    *("post", "tail", "meet"),  # of signals, rings and pairs on Blackwell
    *("post_nothing", "wait_stores"),  # of tiles that are handed out
    *("sync", "acquire", "wait_read", "wait_turn", "pass_turn", "drain"),  # of the backward
    *("open_turns", "take_turn"),
    "wait_copies",  # on Ampere
    *("post_p", "wait_p", "post_ds", "wait_ds"),  # of the wide one
    *("wait_peer", "release_peer", "acquire_ds"),  # and of its pairs of CTAs
    *("wait_sent", "expect", "send_ds"),  # of the Blackwell backward
}
UNWAITED = {
    "acquire_and_advance",
    "wait_and_advance",
    "wait_beside",
}  # dropped, they still move on to the next slot
SYNCHRONISES = DROPPED | UNWAITED
SEEDS = 3


class BorrowingConfig(ForwardConfig):
    """A config whose O lies in Q's memory, however small both are."""

    o_borrows_q = True


@dataclass(frozen=True)
class Problem:
    """What mutants run on; ``left`` is a window's side, if the config has it.

    With ``outgrow`` some rows see the first key far above all others, so that they outgrow a fixed shift.
    """

    config: object
    seqlen_q: int
    seqlen_k: int
    heads: int = 1
    workers: int = 1
    left: int = -1
    outgrow: bool = False

    @property
    def options(self) -> CallOptions:
        """What the call says besides its tensors."""
        scale = self.config.tile_d**-0.5
        return CallOptions(scale, self.config.causal, None, self.left)

    def tensors(self):
        """Random normal q, k and v."""
        rng, c = np.random.default_rng(0), self.config

        def draw(seqlen, head_dim):
            x = rng.standard_normal((1, seqlen, self.heads, head_dim), np.float32)
            return round_to_16_bit(x, c.bf16)

        q, k, v = (
            draw(self.seqlen_q, c.tile_d),
            draw(self.seqlen_k, c.tile_d),
            draw(self.seqlen_k, c.tile_dv),
        )
        if self.outgrow:
            q[:, 5 :: 3 * c.tile_q, :, 0], k[:, 0, :, 0] = 256.0, 16.0
        return q, k, v


# Rings that wrap within a tile and over tiles, one and two warpgroups, turns, blocks skipped at both ends, O in Q's
# memory, tiles that two CTAs share, and such that are handed out, some of them twice.
PROBLEMS = (
    Problem(ForwardConfig(True, 16, 16, 128, 16, True, turns=True), 200, 110, 2),
    Problem(BorrowingConfig(True, 16, 16, 128, 16, False), 300, 75),
    Problem(
        ForwardConfig(
            True, 16, 16, 256, 32, True, stages=4, skip=True, q_stages=2, fixed_shift=True
        ),
        600,
        600,
    ),
    Problem(ForwardConfig(True, 16, 16, 64, 16, False), 200, 30),
    Problem(ForwardConfig(True, 16, 16, 128, 16, True), 300, 300, 2, 2),
    Problem(
        ForwardConfig(True, 16, 16, 128, 16, True, left=True, skip=True, q_stages=2),
        300,
        300,
        left=40,
    ),
    Problem(ForwardConfig(True, 16, 16, 256, 16, True, skip=True, cluster=2), 300, 150),
    Problem(ForwardConfig(True, 16, 16, 128, 16, False, cluster=2), 300, 30),
    Problem(ForwardConfig(True, 16, 16, 64, 16, True, handed_out=True), 500, 70, 2, 2),
    Problem(
        ForwardConfig(
            True, 16, 16, 128, 16, True, skip=True, q_stages=2, fixed_shift=True, handed_out=True
        ),
        500,
        520,
        3,
        2,
        outgrow=True,
    ),
)

# Rings that wrap within a tile and over tiles, tiles of one block and of several, one and two slots of O, a pair of CTAs.
SM100_SMALL = {"bf16": True, "tile_d": 64, "tile_dv": 64, "tile_n": 64, "head": 32}
SM100_PAIR = {**SM100_SMALL, "tile_d": 128, "tile_dv": 128, "ctas": 2}
SM100_WIDE = {**SM100_SMALL, "tile_dv": 128, "q_tiles": 1}
SM100_PROBLEMS = (
    Problem(ForwardConfigSm100(**SM100_SMALL, causal=True, stages=3, o_slots=1), 500, 250),
    Problem(ForwardConfigSm100(**SM100_SMALL, causal=False, stages=2), 700, 60),
    Problem(ForwardConfigSm100(**SM100_SMALL, causal=False, stages=6, fixed_shift=True), 700, 130),
    Problem(ForwardConfigSm100(**SM100_PAIR, causal=True, stages=3, o_slots=1), 900, 250),
    Problem(ForwardConfigSm100(**SM100_PAIR, causal=False, stages=3, fixed_shift=True), 900, 130),
    Problem(ForwardConfigSm100(**SM100_WIDE, causal=True, stages=3, o_slots=1), 300, 250),
    Problem(ForwardConfigSm100(**SM100_WIDE, causal=False, stages=2), 300, 60),
    Problem(ForwardConfigSm100(**SM100_WIDE, causal=False, stages=6, fixed_shift=True), 300, 200),
    Problem(
        ForwardConfigSm100(**SM100_WIDE, ctas=2, causal=True, stages=3, fixed_shift=True),
        500, 250,
    ),
    Problem(ForwardConfigSm100(**SM100_SMALL, causal=True, left=True), 500, 300, left=90),
    Problem(
        ForwardConfigSm100(**SM100_PAIR, causal=True, left=True, stages=3), 600, 300, left=90
    ),
    Problem(
        ForwardConfigSm100(**SM100_WIDE, ctas=2, causal=True, left=True, stages=4), 500, 300, left=90
    ),
)  # fmt: skip


# Slots that wrap, two and three of them; tiles of one block and of several; O that does not fit where Q lay.
SM80_SMALL = {"bf16": True, "tile_d": 32, "warps": 4, "atoms": 1, "tile_n": 16}
SM80_PROBLEMS = (
    Problem(ForwardConfigSm80(**SM80_SMALL, tile_dv=32, causal=False), 64, 90),
    Problem(ForwardConfigSm80(**SM80_SMALL, tile_dv=64, causal=True, stages=3), 100, 110),
    Problem(ForwardConfigSm80(**SM80_SMALL, tile_dv=32, causal=True, left=True), 90, 130, left=40),
)


@dataclass(frozen=True)
class BackwardProblem:
    """What mutants of a backward run on; ``heads`` query heads share a KV head."""

    config: BackwardConfig
    seqlen_q: int
    seqlen_k: int
    heads: int = 1
    workers: int = 1

    @property
    def options(self) -> float:
        """Softmax scale."""
        return self.config.tile_d**-0.5

    def tensors(self):
        """One tuple: random normal q, k, v, out, lse and dout; for a schedule, any out and lse will do."""
        rng, c = np.random.default_rng(0), self.config

        def draw(seqlen, heads, head_dim):
            x = rng.standard_normal((1, seqlen, heads, head_dim), np.float32)
            return round_to_16_bit(x, c.bf16)

        q, dout = (draw(self.seqlen_q, self.heads, d) for d in (c.tile_d, c.tile_dv))
        k, v = (draw(self.seqlen_k, 1, d) for d in (c.tile_d, c.tile_dv))
        lse = np.full((1, self.heads, self.seqlen_q), 5, np.float32)
        return ((q, k, v, 0.1 * dout, lse, dout),)


HANDED_OUT = {"handed_out": True, "first_stores": True, "backwards": True}
BY_TURNS = {"late": True, "alternate": True}
# Tiles of one step and of several, with and without a mask, one tile and several of a CTA, both ways to share out dQ; dQ a
# step late, products by turns, tiles handed out, sums that the first tile stores.
BACKWARD_PROBLEMS = (
    BackwardProblem(BackwardConfig(True, 16, 16, 64, False), 300, 200),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, True), 200, 300, 2),
    BackwardProblem(BackwardConfig(True, 16, 16, 128, True), 300, 300, 1, 2),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, False), 64, 400),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, True, ordered=True), 300, 400, 1, 3),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, False, **HANDED_OUT), 150, 400, 1, 2),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, True, late=True), 200, 300, 2),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, True, late=True, **HANDED_OUT), 300, 400),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, True, **BY_TURNS), 200, 300, 2),
    BackwardProblem(BackwardConfig(True, 16, 16, 64, False, **BY_TURNS, **HANDED_OUT), 300, 400),
)

SHARED_PART = {"bf16": True, "tile_d": 160, "tile_dv": 16, "tile_m": 16, "swap_dq": True}
BACKWARD_192_PROBLEMS = (
    BackwardProblem(Backward192Config(causal=False, **SHARED_PART), 70, 200),
    BackwardProblem(Backward192Config(causal=True, **SHARED_PART), 60, 150, 2),
    BackwardProblem(Backward192Config(causal=False, **SHARED_PART), 16, 400),
    BackwardProblem(Backward192Config(causal=True, ordered=True, **SHARED_PART), 70, 300, 1, 3),
    BackwardProblem(Backward192Config(causal=False, **SHARED_PART, **HANDED_OUT), 40, 400, 1, 2),
)

# One and two parts of dQ for a warpgroup, one CTA and two, one slot of dO and two.
WIDE_BACKWARD_PROBLEMS = (
    BackwardProblem(WideBackwardConfig(True, 128, 64, False, ctas=1), 300, 120),
    BackwardProblem(WideBackwardConfig(True, 192, 64, True), 150, 200, 2),
    BackwardProblem(WideBackwardConfig(True, 256, 64, False, do_stages=2), 300, 150),
    BackwardProblem(WideBackwardConfig(True, 128, 64, False), 64, 300),
    BackwardProblem(WideBackwardConfig(True, 192, 64, True, ordered=True), 200, 300, 1, 3),
)

# One slot of Q and two; keys that warps share, and that they do not; tiles that take turns.
SM80_BACKWARD = {"bf16": True, "tile_d": 32, "tile_dv": 32, "tile_m": 32, "warps": 4}
SM80_BACKWARD_PROBLEMS = (
    BackwardProblem(BackwardConfigSm80(**SM80_BACKWARD, key_warps=4, causal=True), 130, 100),
    BackwardProblem(
        BackwardConfigSm80(**SM80_BACKWARD, key_warps=4, causal=False, stages=1), 70, 64, 2
    ),
    BackwardProblem(BackwardConfigSm80(**SM80_BACKWARD, key_warps=2, causal=False), 100, 40),
    BackwardProblem(
        BackwardConfigSm80(**SM80_BACKWARD, key_warps=2, causal=True, ordered=True), 64, 96
    ),
)

SM80_TWO_ROLES_PROBLEMS = (
    BackwardProblem(BackwardConfigSm80(True, 64, 64, causal=True, **TWO_ROLES), 200, 150),
    BackwardProblem(
        BackwardConfigSm80(True, 64, 64, causal=False, **TWO_ROLES, stages=1), 200, 64, 2
    ),
    BackwardProblem(BackwardConfigSm80(True, 64, 32, causal=True, **OWN_KEYS), 200, 150),
    BackwardProblem(
        BackwardConfigSm80(True, 32, 32, causal=False, **OWN_KEYS, stages=1), 200, 64, 2
    ),
    BackwardProblem(
        BackwardConfigSm80(True, 192, 128, causal=True, **OWN_KEYS, stages=1), 100, 128
    ),
)

JOINT_BACKWARD_PROBLEMS = (
    BackwardProblem(WideBackwardConfig(True, 256, 64, False, joint=True), 300, 200),
    BackwardProblem(WideBackwardConfig(True, 256, 64, True, joint=True, do_stages=2), 250, 200, 2),
)

# Tiles of one step and of several, one tile and several of a CTA, one CTA and a pair, sums in a fixed order.
SM100_BACKWARD_PROBLEMS = (
    BackwardProblem(BackwardConfigSm100(True, 64, 64, False), 300, 200),
    BackwardProblem(BackwardConfigSm100(True, 128, 128, False, ctas=2), 300, 300),
    BackwardProblem(BackwardConfigSm100(True, 64, 64, True, ordered=True), 300, 400, 1, 3),
    BackwardProblem(BackwardConfigSm100(True, 64, 64, False), 100, 200),
    BackwardProblem(
        BackwardConfigSm100(True, 128, 128, True, ctas=2, ordered=True), 300, 300, 1, 2
    ),
)

# V in tensor memory: several steps and one, several tiles and one of a CTA; turns.
SM100_KEPT = {"bf16": True, "tile_d": 256, "tile_dv": 128, "splits": 2}
SM100_WIDE_BACKWARD_PROBLEMS = (
    BackwardProblem(WideBackwardConfigSm100(causal=False, **SM100_KEPT), 200, 200),
    BackwardProblem(WideBackwardConfigSm100(causal=False, **SM100_KEPT), 60, 300),
    BackwardProblem(
        WideBackwardConfigSm100(causal=True, ordered=True, **SM100_KEPT), 150, 300, 1, 2
    ),
)


@dataclass(frozen=True)
class Mutant:
    """A changed schedule.

    Attributes:
        name: what is changed, without line numbers, which move.
        line: of the role source; 0 where it is none.
        synchronises: drops or moves a synchronisation.
        build: makes the variation to run.
    """

    name: str
    line: int
    synchronises: bool
    build: Callable[[], Variation]


def call_of(statement: ast.stmt) -> ast.Call | None:
    """Method call that a simple statement consists of, or assigns."""
    if isinstance(statement, ast.Expr | ast.Assign) and isinstance(statement.value, ast.Call):
        return statement.value if isinstance(statement.value.func, ast.Attribute) else None
    return None


def verb_of(statement: ast.stmt) -> str:
    """Name of the method that a statement calls, or ""."""
    call = call_of(statement)
    return call.func.attr if call else ""


def blocks(tree: ast.Module, class_name: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """(method, statements) of every block of every method of a class, in a fixed order."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    roles = next(node for node in classes if node.name == class_name)
    for role in roles.body:
        if isinstance(role, ast.FunctionDef):
            for node in ast.walk(role):
                for field in ("body", "orelse"):
                    statements = getattr(node, field, None)
                    if isinstance(statements, list) and statements:
                        yield role.name, statements


def text_of(statement: ast.stmt) -> str:
    """First line of a statement."""
    return ast.unparse(statement).partition("\n")[0]


def drop(statements, i):
    """Forget a synchronisation."""
    if verb_of(statements[i]) in UNWAITED:
        call_of(statements[i]).func.attr = "advance_unwaited"
    else:
        statements[i] = ast.copy_location(ast.Pass(), statements[i])


def swap(statements, i):
    """Exchange a statement and the next."""
    statements[i : i + 2] = statements[i + 1], statements[i]


def shift(argument: int, amount: int):
    """Edit that adds to an argument of the range, or of the call, in a statement."""

    def edit(statements, i):
        statement = statements[i]
        call = statement.iter if isinstance(statement, ast.For) else call_of(statement)
        old = call.args[argument]
        new = ast.BinOp(old, ast.Add(), ast.Constant(amount))
        call.args[argument] = ast.fix_missing_locations(ast.copy_location(new, old))

    return edit


def edits(statements: list[ast.stmt]) -> Iterator[tuple[int, str, bool, Callable]]:
    """(index, name, whether it synchronises, edit) of all changes to a block."""
    for i, statement in enumerate(statements):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        verb, text = verb_of(statement), text_of(statement)
        if verb in SYNCHRONISES:
            yield i, f"drop {text}", True, drop
        if verb == "wait_mma":
            for amount in (1, -1) if statement.value.args[0].value else (1,):
                yield i, f"{text} {amount:+}", True, shift(0, amount)
        if isinstance(statement, ast.For) and ast.unparse(statement.iter).startswith("range("):
            for argument in range(len(statement.iter.args)):
                for amount in (1, -1):
                    yield (
                        i,
                        f"{text} argument {argument} {amount:+}",
                        False,
                        shift(argument, amount),
                    )
        if i + 1 < len(statements):
            following = statements[i + 1]
            verbs = {verb, verb_of(following)}
            simple = all(isinstance(s, ast.Expr | ast.Assign) for s in (statement, following))
            if simple or "release" in verbs:
                name = f"swap {text} <-> {text_of(following)}"
                yield i, name, bool(verbs & SYNCHRONISES), swap


def mutants_of_source(
    source: str, path: str, class_name: str, vary: Callable = Variation, used: str | None = None
) -> Iterator[Mutant]:
    """All mutants of a class of a module; ``vary`` makes a variation of the kernel's simulation of it.

    Or of another class of the module, ``used``, that has some of the class.
    """
    seen = {}

    def build(number, index, edit):
        def variation():
            tree = ast.parse(source, path)
            statements = [block for _, block in blocks(tree, class_name)][number]
            edit(statements, index)
            namespace = {"__name__": "mutant"}
            exec(compile(tree, path, "exec"), namespace)  # with the file's lines, for stories
            return vary(namespace[used or class_name])

        return variation

    for number, (role, statements) in enumerate(blocks(ast.parse(source, path), class_name)):
        for index, text, synchronises, edit in edits(statements):
            name = f"{role}: {text}"
            seen[name] = count = seen.get(name, 0) + 1
            name += f" #{count}" if count > 1 else ""
            yield Mutant(name, statements[index].lineno, synchronises, build(number, index, edit))


class OwnReleases(SharedRing):
    """Readers arrive in their own CTA only, where that many arrivals are all that is waited for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for barrier in self.empty:
            barrier.arrivals //= self.spec.ctas
            barrier.missing = barrier.arrivals

    def free(self, index):
        """Arrive for one reader."""
        Ring.free(self, index)


class TwiceReleased(SharedRing):
    """Readers arrive in their own CTA for the other's barrier too: the count is right."""

    def free(self, index):
        """Arrive for one reader, and for that of the other CTA."""
        for _ in self.rings:
            Ring.free(self, index)


class SwappedReleases(SharedRing):
    """Readers arrive twice in the other CTA, and not in their own."""

    def free(self, index):
        """Arrive for one reader."""
        for ring in self.rings:
            arrive_at(self.rings[1 - self.rank].empty[index], ring.arrivals_per_reader)


class OwnCopies(SharedRing):
    """A copy of a part reaches the slot of its own CTA only."""

    def fill(self, index, block, nbytes):
        """Start the copy of this CTA's part of ``block``."""
        self.fill_of(self.rank, index, block, nbytes)


class WholeCopies(SharedRing):
    """Each CTA copies all of a block into its own slot, and its part into the other's."""

    def fill(self, index, block, nbytes):
        """Start the copies."""
        Ring.fill(self, index, block, nbytes)
        self.fill_of(1 - self.rank, index, block, nbytes)


class OwnCounts(SharedRing):
    """Bytes count in the CTA that copies, wherever they go."""

    def counter(self, rank):
        """Barriers that count the bytes of copies into a CTA's slots."""
        return self.full


def cluster_mutants(vary: Callable = Variation) -> Iterator[Mutant]:
    """Mutants of what CTAs do that share tiles: how they meet, release and copy; ``vary`` makes the variations."""
    for kind in (
        OwnReleases, TwiceReleased, SwappedReleases, OwnCopies, WholeCopies, OwnCounts,
    ):  # fmt: skip
        name = f"cluster: {kind.__doc__.rstrip('.')}"
        yield Mutant(name, 0, True, functools.partial(vary, shared=kind))
    for left, where in (("end", "before the roles begin"), ("start", "before one ends")):
        name = f"cluster: CTAs do not meet {where}"
        yield Mutant(name, 0, True, functools.partial(vary, meets=(left,)))


def handout_mutants() -> Iterator[Mutant]:
    """Mutants of how tiles of dense calls are handed out: of what gives them, and of what is told."""
    source, path = inspect.getsource(handout), handout.__file__
    for class_name, used, role in (
        ("GivenDense", "GivenDense", "given"),
        ("ToldTiles", "ToldDense", "told"),
    ):

        def vary(kind, role=role):
            return Variation(**{role: plain_next(kind)})

        for mutant in mutants_of_source(source, path, class_name, vary, used):
            yield replace(mutant, name=f"{role} {mutant.name}")


def plain_next(kind: type) -> type:
    """A class of tiles whose compiled methods run in plain Python."""
    methods = {
        name: plain(getattr(kind, name)) for name in ("_next", "_ask") if hasattr(kind, name)
    }
    return type(kind.__name__, (kind,), methods)


def sm90_fwd_mutants() -> list[Mutant]:
    """All mutants of the Hopper forward: of its source, how its ends count slots, and how CTAs share or get tiles."""
    source = inspect.getsource(fwd_roles)
    found = list(mutants_of_source(source, fwd_roles.__file__, "ForwardRoles"))
    found += [*cluster_mutants(), *handout_mutants()]
    for role, rings in (("load", "qkv"), ("mma", "qk")):  # mma finds slots of V beside those of K
        for ring in rings:
            for amount in (1, -1) if ring != "q" else (1,):
                miscounts = {(role, ring): amount}
                name = f"{role}: counts the slots of {ring} {amount:+}"
                build = functools.partial(Variation, miscounts=miscounts)
                found.append(Mutant(name, 0, False, build))
    return found


def sm100_fwd_mutants() -> list[Mutant]:
    """All mutants of the Blackwell forward's source: of the roles with two Q tiles, and of those with one."""
    kinds = ((fwd_roles_sm100, "ForwardRoles", ""), (fwd_wide_roles_sm100, "WideRoles", "wide "))
    return [
        replace(mutant, name=prefix + mutant.name)
        for module, roles, prefix in kinds
        for mutant in mutants_of_source(
            inspect.getsource(module), module.__file__, roles, sm100_fwd.Variation
        )
    ]


def sm100_bwd_mutants() -> list[Mutant]:
    """All mutants of the Blackwell backward's source: of the roles of one CTA, and of those of a pair."""

    def mutants(module, name, vary):
        return mutants_of_source(inspect.getsource(module), module.__file__, name, vary)

    vary = sm100_bwd.Variation
    found = list(mutants(bwd_roles_sm100, "BackwardRoles", vary))
    pair = mutants(bwd_pair_roles_sm100, "PairRoles", lambda roles: vary(pair_roles=roles))
    found += [replace(mutant, name=f"pair {mutant.name}") for mutant in pair]
    name = "pair: CTAs do not meet before one ends"
    return [*found, Mutant(name, 0, True, functools.partial(vary, meets=False))]


def sm100_bwd_wide_mutants() -> list[Mutant]:
    """Those of the wide one's roles that keep V in tensor memory."""
    source, path = inspect.getsource(bwd_wide_roles_sm100), bwd_wide_roles_sm100.__file__

    def vary(roles):
        return sm100_bwd_wide.WideVariation(kept=roles)

    return list(mutants_of_source(source, path, "KeptRoles", vary))


def sm90_bwd_mutants() -> list[Mutant]:
    """All mutants of the Hopper backward: of its source, and of how its ends count slots."""
    source, path, vary = inspect.getsource(bwd_roles), bwd_roles.__file__, sm90_bwd.Variation
    found = list(mutants_of_source(source, path, "BackwardRoles", vary))
    kinds = (
        ("late", bwd_late_roles, "LateRoles"),
        ("alternate", bwd_alternate_roles, "AlternateRoles"),
    )
    for name, module, roles in kinds:
        mutants = mutants_of_source(
            inspect.getsource(module), module.__file__, roles,
            lambda roles, name=name: vary(**{f"{name}_roles": roles}),
        )  # fmt: skip
        found += [replace(mutant, name=f"{name} {mutant.name}") for mutant in mutants]
    return found + list(miscounts(("load", "mma"), vary))


def sm90_bwd_192_mutants() -> list[Mutant]:
    """Those of its roles for head dims of 136 to 192; ``load`` and ``reduce`` are the narrow one's."""
    source, path = inspect.getsource(bwd_192_roles), bwd_192_roles.__file__
    vary = sm90_bwd_192.Variation192
    found = list(mutants_of_source(source, path, "Backward192Roles", vary))
    return found + list(miscounts(("load", "mma"), vary))


def sm90_bwd_wide_mutants() -> list[Mutant]:
    """The same of the wide Hopper backward, and of how its CTAs share tiles; ``load`` is the narrow one's."""
    source, path = inspect.getsource(bwd_wide_roles), bwd_wide_roles.__file__
    vary = sm90_bwd_wide.WideVariation
    found = list(mutants_of_source(source, path, "WideBackwardRoles", vary))
    found += cluster_mutants(vary)
    return found + list(miscounts(("load", "mma_v", "mma_k"), vary))


def sm90_bwd_joint_mutants() -> list[Mutant]:
    """Those of the wide Hopper backward's roles whose CTAs add dQ up together."""
    source, path = inspect.getsource(bwd_joint_roles), bwd_joint_roles.__file__
    vary = sm90_bwd_wide.WideVariation
    found = list(mutants_of_source(source, path, "JointBackwardRoles", vary))
    vary = functools.partial(vary, bwd_joint_roles.JointBackwardRoles)
    return found + list(miscounts(("mma_v", "mma_k"), vary))


def miscounts(roles, vary: Callable) -> Iterator[Mutant]:
    """Mutants of a backward whose ends have too many or too few slots."""
    for role in roles:
        for ring in ("k", "v", "q", "do"):
            for amount in (1, -1) if ring in ("q", "do") else (1,):
                build = functools.partial(vary, miscounts={(role, ring): amount})
                yield Mutant(f"{role}: counts the slots of {ring} {amount:+}", 0, False, build)


def _concerns(variation, config) -> bool:
    """Whether a config runs the roles of a variation; a kernel may have two kinds."""
    choose = getattr(variation, "roles_for", None)
    return choose is None or variation.roles in (None, choose(config))


class Jury:
    """Runs variations on the problems and compares with what the kernel itself gives."""

    def __init__(self, problems=PROBLEMS, seeds: int = SEEDS, simulate=simulate_forward):
        self._seeds, self._simulate = seeds, simulate
        self._problems = [(problem, problem.tensors()) for problem in problems]
        self._expected = [self._run(*case, 0, None) for case in self._problems]

    def _run(self, problem, tensors, seed, variation):
        arguments = (problem.options, problem.workers, seed, variation)
        return self._simulate(problem.config, *tensors, *arguments)

    def verdict(self, mutant: Mutant, seeds: int | None = None) -> str | None:
        """How a mutant is reported; None if it is not, in so many orders, or in as many as the jury tries."""
        variation = mutant.build()
        for seed in range(self._seeds if seeds is None else seeds):
            for case, expected in zip(self._problems, self._expected):
                if not _concerns(variation, case[0].config):
                    continue
                try:
                    result = self._run(*case, seed, variation)
                except Hazard as hazard:
                    return f"{type(hazard).__name__.lower()}: {hazard}"
                except Exception as error:  # a mutant may fail in any way
                    return f"{type(error).__name__}: {error}"
                if not all(np.array_equal(a, b) for a, b in zip(result, expected)):
                    return "wrong numbers"
        return None


def sm80_mutants(module, class_name: str, vary: Callable) -> list[Mutant]:
    """All mutants of an Ampere kernel's source."""
    source = inspect.getsource(module)
    return list(mutants_of_source(source, module.__file__, class_name, vary))


KERNELS = {
    "sm80-fwd": lambda: sm80_mutants(fwd_roles_sm80, "ForwardRoles", sm80_fwd.Variation),
    "sm80-bwd": lambda: sm80_mutants(bwd_roles_sm80, "BackwardRoles", sm80_bwd.Variation),
    "sm80-bwd-two": lambda: sm80_mutants(
        bwd_two_roles_sm80, "TwoBackwardRoles", lambda roles: sm80_bwd.Variation(two_roles=roles)
    ),
    "sm90-fwd": sm90_fwd_mutants,
    "sm90-bwd": sm90_bwd_mutants,
    "sm90-bwd-192": sm90_bwd_192_mutants,
    "sm90-bwd-wide": sm90_bwd_wide_mutants,
    "sm90-bwd-joint": sm90_bwd_joint_mutants,
    "sm100-fwd": sm100_fwd_mutants,
    "sm100-bwd": sm100_bwd_mutants,
    "sm100-bwd-wide": sm100_bwd_wide_mutants,
}
JURIES = {
    "sm80-fwd": lambda: Jury(SM80_PROBLEMS, simulate=sm80_fwd.simulate_forward),
    "sm80-bwd": lambda: Jury(SM80_BACKWARD_PROBLEMS, simulate=sm80_bwd.simulate_backward),
    "sm80-bwd-two": lambda: Jury(SM80_TWO_ROLES_PROBLEMS, simulate=sm80_bwd.simulate_backward),
    "sm90-fwd": Jury,
    "sm90-bwd": lambda: Jury(BACKWARD_PROBLEMS, simulate=sm90_bwd.simulate_backward),
    "sm90-bwd-192": lambda: Jury(
        BACKWARD_192_PROBLEMS, simulate=sm90_bwd_192.simulate_backward_192
    ),
    "sm90-bwd-wide": lambda: Jury(
        WIDE_BACKWARD_PROBLEMS, simulate=sm90_bwd_wide.simulate_wide_backward
    ),
    "sm90-bwd-joint": lambda: Jury(
        JOINT_BACKWARD_PROBLEMS, simulate=sm90_bwd_wide.simulate_wide_backward
    ),
    "sm100-fwd": lambda: Jury(SM100_PROBLEMS, simulate=sm100_fwd.simulate_forward),
    "sm100-bwd": lambda: Jury(SM100_BACKWARD_PROBLEMS, simulate=sm100_bwd.simulate_backward),
    "sm100-bwd-wide": lambda: Jury(
        SM100_WIDE_BACKWARD_PROBLEMS, simulate=sm100_bwd_wide.simulate_wide_backward
    ),
}


def command(kernel: str, harmless: dict[str, str], sample: int | None, seed: int) -> int:
    """Judge a kernel's mutants and print the verdicts; returns 1 if one is neither reported nor known as harmless."""
    mutants, jury, start = KERNELS[kernel](), JURIES[kernel](), time.perf_counter()
    if sample is not None:
        mutants = random.Random(seed).sample(mutants, min(sample, len(mutants)))
    counts = {"reported": 0, "harmless": 0, "NOT REPORTED": 0}
    for mutant in mutants:
        report = jury.verdict(mutant)
        known = harmless.get(mutant.name)
        kind = "reported" if report else "harmless" if known else "NOT REPORTED"
        counts[kind] += 1
        where = f"{mutant.line:4}" if mutant.line else "    "
        print(f"{kind:12} {where} {mutant.name}\n{'':17} {report or known or ''}", flush=True)
    print(f"{len(mutants)} mutants in {time.perf_counter() - start:.0f} s:", end=" ")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["NOT REPORTED"] else 0
