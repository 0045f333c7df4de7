"""The Hopper forward's own role functions, in plain Python: right numbers in any order, and no spare synchronisation."""

import inspect
import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4.jit.compile import compile_kernel
from flash4.problem import AttentionProblem
from flash4.sim.machine import Barrier, Deadlock, End, Hazard, Machine, Memory, Ring
from flash4.sim.sm90_fwd import round_to_16_bit, simulate_forward
from flash4.sm90 import fwd_roles
from flash4.sm90.fwd_config import ForwardConfig, choose_config
from tests.checks import assert_forward_close


@dataclass(frozen=True)
class Case:
    """A problem for a config."""

    config: ForwardConfig
    head_dim: int
    head_dim_v: int
    batch: int = 1
    seqlen_q: int = 200
    seqlen_k: int = 200
    heads_kv: int = 1
    ratio: int = 1
    softmax_scale: float = 0.1
    value_scale: float = 1.0
    workers: int = 2

    def tensors(self):
        """Random normal q, k, v in the config's dtype."""
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if self.config.bf16 else torch.float16

        def draw(seqlen, heads, head_dim):
            x = torch.randn(self.batch, seqlen, heads, head_dim, generator=generator)
            return (x * self.value_scale).to(dtype)

        return (
            draw(self.seqlen_q, self.heads_kv * self.ratio, self.head_dim),
            draw(self.seqlen_k, self.heads_kv, self.head_dim),
            draw(self.seqlen_k, self.heads_kv, self.head_dim_v),
        )


def shipped(head_dim, head_dim_v, causal, bf16=True):
    """Config that a call with these head dims gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    facts = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal)
    return choose_config(facts)[0]


KINDS = (
    # head_dim, head_dim_v, causal, bf16
    (64, 64, True, True),
    (64, 64, False, True),
    (40, 8, True, False),
    (128, 128, True, True),
    (128, 128, False, False),
    (192, 128, True, True),
    (64, 256, False, True),
    (256, 64, True, True),
    (256, 256, True, False),
    (256, 256, False, True),
)
CONFIGS = [(shipped(*kind), *kind[:2]) for kind in KINDS]
# Not shipped, but supported: two and three warpgroups with turns, and one alone, under a causal mask.
CONFIGS += [
    (ForwardConfig(True, 64, 64, tile_m, tile_n, True, turns=True), 64, 64)
    for tile_m, tile_n in ((64, 64), (128, 64), (192, 128))
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The references here are so small that a second thread costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(case: Case, seed: int = 0, roles=fwd_roles.ForwardRoles):
    """Simulate a case and check it against float64."""
    inputs = case.tensors()
    arrays = (x.float().numpy() for x in inputs)
    out, lse = simulate_forward(case.config, *arrays, case.softmax_scale, case.workers, seed, roles)
    assert_forward_close(
        torch.from_numpy(out).to(inputs[0].dtype),
        torch.from_numpy(lse),
        inputs,
        causal=case.config.causal,
        softmax_scale=case.softmax_scale,
    )


def test_the_configs_cover_what_can_differ():
    configs = [config for config, *_ in CONFIGS]
    assert {config.mma_warpgroups for config in configs} == {1, 2, 3, 4}
    assert {config.o_borrows_q for config in configs} == {False, True}
    assert {config.skip for config in configs} == {False, True}
    assert {config.turns for config in configs} == {False, True}


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda i: f"{i}-{CONFIGS[i][1:]}")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 300), (300, 150), (257, 257)])
def test_numbers(index, seqlen_q, seqlen_k):
    config, head_dim, head_dim_v = CONFIGS[index]
    case = Case(config, head_dim, head_dim_v, 1, seqlen_q, seqlen_k, 2)
    run(case, seed=index)


def lengths(unit: int, most: int):
    """Lengths at the edges of tiles, and others."""
    edges = st.builds(lambda n, d: n * unit + d, st.integers(1, most), st.sampled_from((0, 1, -1)))
    return st.one_of(edges, st.integers(1, most * unit))


@st.composite
def cases(draw):
    config, head_dim, head_dim_v = draw(st.sampled_from(CONFIGS))
    pack, ratio = draw(st.sampled_from((1, 1, 2, 4, 8))), draw(st.sampled_from((1, 2, 3, 5, 8)))
    scale = draw(st.sampled_from((0.1, 0.1, 0.02, 0.7, 0.0, -0.1)))
    config = replace(config, pack=pack, negate=scale < 0)
    return Case(
        config,
        head_dim,
        head_dim_v,
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(lengths(config.tile_q, 2)),
        seqlen_k=draw(lengths(config.tile_n, 4)),
        heads_kv=draw(st.integers(1, 2)),
        ratio=ratio,
        softmax_scale=scale,
        value_scale=draw(st.sampled_from((1.0, 0.1, 3.0))),
        workers=draw(st.integers(1, 4)),
    )


@settings(max_examples=100)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("pack", [2, 4, 8])
def test_packed_heads(pack, ratio):
    config = replace(shipped(64, 64, True), pack=pack)
    run(Case(config, 64, 64, 1, 70, 130, 2, ratio), seed=ratio)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.5])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scale, causal):
    config = replace(shipped(128, 128, causal), negate=scale < 0)
    run(Case(config, 128, 128, 1, 130, 300, 2, softmax_scale=scale))


def test_every_order_gives_the_same_bits():
    case = Case(shipped(64, 64, True), 64, 64, 2, 300, 300, 2)
    arrays = [x.float().numpy() for x in case.tensors()]
    results = [
        simulate_forward(case.config, *arrays, 0.1, workers, seed)
        for workers, seed in ((1, 0), (2, 1), (3, 2), (8, 3))
    ]
    for out, lse in results[1:]:
        assert (out == results[0][0]).all() and (lse == results[0][1]).all()


def test_simulates_after_compiling():
    """Tracing replaces the code of the role functions; ``plain`` finds the original."""
    config = ForwardConfig(True, 64, 64, 64, 64, False)
    compile_kernel("flash4.sm90.fwd:ForwardSm90", config, "sm_90a")
    run(Case(config, 64, 64, 1, 100, 150, 2))


def test_rounding_is_torchs():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 100
    x = torch.cat([x, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1 + 2**-9, 1 + 3 * 2**-9])])
    for dtype, bf16 in ((torch.bfloat16, True), (torch.float16, False)):
        expected = x.to(dtype).float()
        assert torch.equal(torch.from_numpy(round_to_16_bit(x.numpy(), bf16)), expected)


# Mutants: the role source with one line changed. Among these problems are a ring that wraps within a tile and over
# tiles, O in Q's memory, and warpgroups that skip blocks.
HUNTERS = (
    Case(ForwardConfig(True, 64, 64, 128, 64, True, turns=True), 64, 64, 2, 200, 300),
    Case(ForwardConfig(True, 256, 256, 128, 64, False), 256, 256, 1, 300, 300),
    Case(ForwardConfig(True, 64, 64, 256, 64, True, stages=4, skip=True), 64, 64, 1, 600, 600),
)
SEEDS = range(4)
SOURCE = inspect.getsource(fwd_roles).splitlines()
SYNCHRONISES = (
    r"\.(commit|release)\(\)|ops\.wait_mma\(|turn\.(open|wait|pass_on)\(\)|ops\.wait_store\(\)"
)
# Nothing breaks without these statements, and why.
SPARE = {"turn.wait()": "warpgroups take turns for speed alone"}
LAST_V_MAY_BE_EARLY = (
    "the loader keeps K a block ahead of V: before it fills this slot again, it needs a K slot that this warpgroup "
    "releases only afterwards"
)


def mutant(lines: list[str]):
    """Role class of a source."""
    namespace = {"__name__": "mutant"}
    exec(compile("\n".join(lines), "<mutant>", "exec"), namespace)
    return namespace["ForwardRoles"]


def report(roles) -> str | None:
    """How the first hunter that notices something puts it."""
    for seed in SEEDS:
        for case in HUNTERS:
            try:
                run(case, seed, roles)
            except (Hazard, AssertionError) as error:
                return f"{type(error).__name__}: {error}"
    return None


def lines_that(pattern: str) -> list[int]:
    """Indices of the source lines that match."""
    return [i for i, line in enumerate(SOURCE) if re.search(pattern, line)]


def statement(index: int) -> str:
    """Statement in a source line, without its comment."""
    return SOURCE[index].partition("#")[0].strip()


def line_id(index: int) -> str:
    return f"{index + 1}:{statement(index)}"


def test_the_source_itself_passes():
    assert report(mutant(SOURCE)) is None


@pytest.mark.parametrize("index", lines_that(SYNCHRONISES), ids=line_id)
def test_a_missing_synchronisation_is_reported(index):
    if statement(index) in SPARE:
        pytest.skip(SPARE[statement(index)])
    indent = re.match(" *", SOURCE[index]).group()
    assert report(mutant([*SOURCE[:index], f"{indent}pass", *SOURCE[index + 1 :]]))


def early_releases() -> list[int]:
    """Releases that directly follow a wait of ``ops``."""
    return [
        i
        for i in lines_that(r"\.release\(\)")
        if statement(i - 1).startswith(("ops.wait_mma(", "ops.wait_store("))
    ]


@pytest.mark.parametrize("index", early_releases(), ids=line_id)
def test_an_early_release_is_reported(index):
    last_v = max(i for i in early_releases() if statement(i) == "v_slot.release()")
    if index == last_v:
        pytest.skip(LAST_V_MAY_BE_EARLY)
    swapped = [SOURCE[index], SOURCE[index - 1]]
    assert report(mutant([*SOURCE[: index - 1], *swapped, *SOURCE[index + 1 :]]))


@dataclass(frozen=True)
class Spec:
    """A ring of two slots for one reader with one arrival."""

    name: str = "k"
    stages: int = 2
    stage_bytes: int = 4
    consumer_arrivals: int = 1


def one(value: float):
    return torch.full((1, 1), value).numpy()


def produce(end, count, nbytes=4):
    for i in range(count):
        slot = end.acquire_and_advance()
        slot.fill(one(i), nbytes)
        slot.commit()


def consume(end, count, seen):
    for _ in range(count):
        slot = end.wait_and_advance()
        seen.append(slot.ring.memory.arrays[slot.index].item())
        slot.release()


@pytest.mark.parametrize("seed", range(6))
def test_a_ring_delivers_in_order(seed):
    machine, seen = Machine(seed), []
    ring = Ring(machine, Spec(), 1)
    machine.spawn("load", produce, End(ring), 7)
    machine.spawn("mma", consume, End(ring), 7, seen)
    machine.run()
    assert seen == list(range(7))


@pytest.mark.parametrize(
    ("made", "used", "nbytes", "message"),
    [
        (5, 1, 4, r"^load waits for phase 0 of k empty\[1\] .*1 of 1 arrivals"),
        (1, 2, 4, r"^mma waits for phase 0 of k full\[1\] .*1 of 1 arrivals"),
        (1, 1, 2, r"^mma waits for phase 0 of k full\[0\] .* 2 bytes missing"),
    ],
)
def test_a_deadlock_says_who_waits_for_what(made, used, nbytes, message):
    machine = Machine(0)
    ring = Ring(machine, Spec(), 1)
    machine.spawn("load", produce, End(ring), made, nbytes)
    machine.spawn("mma", consume, End(ring), used, [])
    with pytest.raises(Deadlock, match=message):
        machine.run()


def test_hazards_are_reported():
    machine = Machine(0)
    barrier = Barrier(machine, "b", 1)
    with pytest.raises(Hazard, match="b: more than 1 arrivals"):
        barrier.arrive(2)
    machine.start_copy(lambda: None)
    with pytest.raises(Hazard, match="1 copies in flight"):
        machine.run()


def test_memory_that_overlaps_is_spoilt():
    q, o = Memory(1), Memory(2)
    q.overlaps, o.overlaps = [o], [q]
    q.write(0, one(1.0))
    assert q.arrays[0].item() == 1.0
    o.write(1, one(2.0))
    assert o.arrays[1].item() == 2.0 and q.arrays[0] != q.arrays[0]
