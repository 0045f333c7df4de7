"""The Blackwell forward compiles for every kind of config that ships, within limits that are checked in.

Nothing here has run on a GPU. Spills, MMAs, exponentials and waits must be what config and schedule say. Instruction
counts, of the kernel and of each role's inner loop, are those of one compiler; ``fwd100_limits.json`` holds them, and
``python -m tests.host.test_compile_fwd100`` writes it anew after a change of the kernel that is meant to change them.
"""

import json
import multiprocessing
import re
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from flash4.common import mods
from flash4.jit import compile as jit_compile
from flash4.jit.inspect import count_resources, disassemble
from flash4.problem import AttentionProblem
from flash4.sim.machine import Hazard
from flash4.sim.sm100_fwd import check_limits
from flash4.sm100.fwd import ForwardSm100
from flash4.sm100.fwd_config import (
    COLUMN_STEP,
    KEY_STEP,
    SM103,
    SMEM_LIMIT,
    ForwardConfig,
    can_implement,
    choose_config,
)
from flash4.sm100.fwd_ends import Wait
from flash4.sm100.fwd_ops import UNROLLED_DIM
from tests import strategies
from tests.host.sass_loops import loops

LIMITS = Path(__file__).with_name("fwd100_limits.json")
LOOPS = ("mma", "softmax", "masked softmax", "correction")
SLACK = 1.01  # of the instruction counts
WORKERS = 2
KERNEL = "flash4.sm100.fwd:ForwardSm100"
MASKS = {"full": False, "causal": True}
CHOICES = {"sm_100a": choose_config, "sm_103a": SM103.choose_config}  # by target


def problem(head_dim, head_dim_v, causal=False, bf16=True, ratio=1, negate=False, **facts):
    dtype = torch.bfloat16 if bf16 else torch.float16
    sizes = (1, 4096, 4096, ratio, 1, head_dim, head_dim_v)
    return AttentionProblem(dtype, *sizes, causal, negative_scale=negate, **facts)


def config_for(*arguments, **keywords) -> ForwardConfig:
    """Config that a call gets."""
    facts = problem(*arguments, **keywords)
    assert can_implement(facts) is None
    return choose_config(facts)[0]


def shipped() -> dict[str, tuple[ForwardConfig, str]]:
    """Name -> config and target."""
    named = {
        f"{d}/{dv} {mask}": config_for(d, dv, causal)
        for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256))
        for mask, causal in MASKS.items()
    }
    named["256/256 causal, few rows"] = choose_config(
        replace(problem(256, 256, True), seqlen_q=100)
    )[0]
    named["136/200 full, fp16"] = config_for(136, 200, bf16=False)
    named["64/128 full"] = config_for(64, 128)
    alone = replace(named["128/128 full"], ctas=1)
    named["128/128 full, one CTA"] = replace(alone, stages=named["128/128 causal"].stages)
    named["128/128 causal, pair"] = replace(named["128/128 full"], causal=True)
    named["128/64 causal, fp16"] = config_for(128, 64, True, bf16=False)
    named["128/128 causal, pack 4, negate"] = config_for(
        128, 128, True, ratio=4, pack_gqa=True, negate=True
    )
    found = {name: (config, "sm_100a") for name, config in named.items()}
    for name in ("128/128 full", "192/128 causal", "256/256 causal"):
        (d, dv), causal = map(int, name.split()[0].split("/")), "causal" in name
        config = SM103.choose_config(problem(d, dv, causal))[0]
        found[f"{name}, sm_103a"] = (config, "sm_103a")
    found["128/128 causal, sm_110a"] = (named["128/128 causal"], "sm_110a")
    return found


def featured() -> dict[str, tuple[ForwardConfig, str]]:
    """Name -> config and target, for one or two features at a time."""
    mods_of = {
        "mods": ("relative", "dilated", []),
        "mods with tensors": ("heads", "documents", [torch.zeros(2, 2), torch.zeros(2, 2).int()]),
    }
    facts = {
        "window": {"window_left": True, "window_right": True},
        "softcap, sink": {"softcap": True, "sink": True, "causal": True},
        "alibi": {"alibi": True, "causal": True},
        "cu_seqlens": {"cu_q": True, "cu_k": True, "causal": True},
        "seqused": {"used_q": True, "used_k": True},
        "seqused_k, fp16": {"used_k": True, "bf16": False},
        "window, cu_seqlens": {
            "window_left": True,
            "window_right": True,
            "cu_q": True,
            "cu_k": True,
        },
        "window, cu_seqlens, sink": {
            "window_left": True,
            "window_right": True,
            "cu_q": True,
            "cu_k": True,
            "sink": True,
        },
        "cu_seqlens_q, seqused_k, pack 64": {
            "cu_q": True,
            "used_k": True,
            "causal": True,
            "ratio": 64,
            "pack_gqa": True,
        },
        "softcap, seqused": {"softcap": True, "used_q": True, "used_k": True},
    } | {
        name: {
            "score_mod": mods.register(strategies.SCORE_MODS[score]),
            "mask_mod": mods.register(strategies.MASK_MODS[mask]),
            "aux": mods.encode_aux(tensors),
        }
        for name, (score, mask, tensors) in mods_of.items()
    }
    found = {
        f"{name}, {target}": (choose_config(problem(128, 128, **kinds))[0], target)
        for name, kinds in facts.items()
        for target, choose_config in CHOICES.items()
    }
    for name in ("window, cu_seqlens, sink", "mods with tensors"):
        found[f"256/256, {name}"] = (config_for(256, 256, **facts[name]), "sm_100a")
    found["192/128, cu_seqlens"] = (config_for(192, 128, **facts["cu_seqlens"]), "sm_100a")
    return found


CONFIGS = shipped()
FEATURED = featured()


def features(sass: str) -> dict[str, int]:
    """Instructions of the kernel, of the inner loop of each role, and what else is looked at."""
    found, inner = count_resources(sass), loops(sass)

    def loop(test):
        return next(x for x in inner if test(x))

    mma = loop(lambda x: x.count("UTCHMMA") >= 8 and x.count("UTCBAR") >= 4)
    # S in pieces of 32 columns, and one more where mods go through them in a loop.
    softmax = [x for x in inner if x.count("MUFU.EX2") > 32 and x.count("LDTM") in range(2, 6)]
    correction = loop(lambda x: x.count("LDTM") >= 4 and x.count("STTM") and not x.count("MUFU"))
    masked = [x for x in softmax if x.count("R2P") > 4 or x.count("ISETP") > 64]
    looking = [x for x in softmax if x not in masked and x.count("FMNMX3") > 16]
    return {
        "registers": found.registers,
        "spills": found.spill_loads + found.spill_stores,
        "loop spills": sum(x.count("LDL", "STL") for x in (mma, *softmax, correction)),
        "mmas": found.tcgen05,
        "exp2": found.exp2,
        "kernel": found.instructions,
        "mma loop": mma.count(),
        "mma loop waits": mma.count("SYNCS.PHASECHK"),
        "softmax loop": softmax[0].count(),
        "softmax loop waits": softmax[0].count("SYNCS.PHASECHK"),
        "softmax loop posts": softmax[0].count("SYNCS.ARRIVE"),
        "looking softmax loop": looking[0].count() if looking else 0,
        "masked softmax loop": masked[0].count() if masked else 0,
        "correction loop": correction.count(),
        "correction loop waits": correction.count("SYNCS.PHASECHK"),
    }


VERSION, SWIZZLE_128 = 1 << 46, 2 << 61  # of a descriptor of shared memory
BIG = re.compile(r"(?<![\w.])\d{6,}\b")


def smem_descriptor(leading: int, stride: int = 1024) -> int:
    """Descriptor of an operand under the 128-byte swizzle at address 0; distances in bytes, as the PTX ISA has it."""
    return leading // 16 << 16 | stride // 16 << 32 | VERSION | SWIZZLE_128


def instruction_descriptor(config: ForwardConfig, columns: int, transposed: bool) -> int:
    """Descriptor of an MMA with float32 accumulators; B may be stored with its rows contiguous."""
    kind = int(config.bf16)
    rows = 128 * config.ctas
    return (
        1 << 4 | kind << 7 | kind << 10 | transposed << 16 | columns // 8 << 17 | rows // 16 << 24
    )


def descriptors(ptx: str) -> set[int]:
    """Numbers in PTX that can only be descriptors; those of shared memory without the address."""
    found = {int(text) for text in BIG.findall(ptx)}
    shared = {x & ~0x3FFF for x in found if x >> 61 == 2 and x >> 46 & 7 == 1}
    return shared | {x for x in found if x >> 24 in (128 // 16, 256 // 16) and x & 0x3F == 1 << 4}


def compile_one(case: tuple[ForwardConfig, str]) -> dict[str, int]:
    """Compile a config and count; runs in a worker process. The compiler must have nothing to warn of."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        jit_compile.compile_kernel(KERNEL, *case, folder)
        (cubin,), (ptx,) = (list(Path(folder).glob(f"*.{kind}")) for kind in ("cubin", "ptx"))
        literals = descriptors(ptx.read_text("utf-8"))
        return {**features(disassemble(cubin)), "descriptors": literals}


def compile_all(cases) -> dict[str, dict[str, int]]:
    """Counts of configs by name; two processes, because tracing holds the interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        return dict(zip(cases, pool.map(compile_one, cases.values()), strict=True))


@pytest.fixture(scope="module")
def compiled():
    return compile_all({**CONFIGS, **FEATURED})


def launch_registers(config: ForwardConfig) -> int:
    """Registers of a thread at launch."""
    return config.graph.launch_registers // config.graph.threads


def mmas(config: ForwardConfig) -> int:
    """MMAs in the code: of all Q tiles, of the first block, of the loop and of the last one."""
    qk = config.tile_d // KEY_STEP if config.tile_d <= UNROLLED_DIM else 4
    return config.q_tiles * (2 * qk + 2 * config.tile_n // KEY_STEP)


def waits_of(config: ForwardConfig) -> list[int]:
    """In the loops of mma, softmax and correction.

    K, V, and P of each tile in two parts; S; the factors of both tiles. With one tile as many of that, and correction
    waits for P V.
    """
    return [6, 1, 2] if config.q_tiles > 1 else [4, 1, 2]


@pytest.mark.parametrize("name", CONFIGS)
def test_resources(name, compiled):
    config, found = CONFIGS[name][0], compiled[name]
    assert found["loop spills"] == 0, found
    # Outside of loops: the end of a pair's tensor memory, and that of a tile with a fixed shift.
    pair, fixed = config.ctas - 1, config.fixed_shift
    assert found["spills"] <= 10 * pair + 4 * fixed + 16 * pair * fixed, found
    assert found["registers"] == launch_registers(config), found
    assert found["mmas"] == mmas(config), found
    on_fma = config.head * config.poly // 16
    copies = 2 + config.fixed_shift  # masked blocks, those with a fixed shift, and the others
    assert found["exp2"] == copies * (config.tile_n - on_fma) + 2, "and two factors"
    waits = [found[f"{role} loop waits"] for role in ("mma", "softmax", "correction")]
    assert waits == waits_of(config), found
    assert found["softmax loop posts"] == 3, "factor, and P in two parts"


# Instructions for 128 scores of flash-attn-4 4.0.0b36, which looks at every maximum, from the same compiler; waits of its MMA
# loop. ``python -m bench.blackwell_loops`` compiles it anew.
PEER = {
    "128/128 full": {"softmax": 542, "looking softmax": 542, "mma": 202, "correction": 185},
    "128/128 causal, pair": {
        "softmax": 513,
        "looking softmax": 513,
        "masked softmax": 688,
        "mma": 205,
        "correction": 186,
    },
}
PEER_WAITS = {"mma": 6, "softmax": 2}


@pytest.mark.parametrize(("name", "peer"), PEER.items(), ids=PEER)
def test_loops_are_shorter_than_flash_attn_4s(name, peer, compiled):
    found = compiled[name]
    assert all(0 < found[f"{loop} loop"] < count for loop, count in peer.items()), found
    assert all(found[f"{loop} loop waits"] <= count for loop, count in PEER_WAITS.items()), found


@pytest.mark.parametrize("name", FEATURED)
def test_resources_of_features(name, compiled):
    config, found = FEATURED[name][0], compiled[name]
    assert found["loop spills"] == 0, found
    assert found["registers"] == launch_registers(config), found
    assert found["mmas"] == mmas(config), found
    waits = [found[f"{role} loop waits"] for role in ("mma", "softmax", "correction")]
    assert waits == waits_of(config), found


@pytest.mark.parametrize("name", CONFIGS)
def test_descriptors(name, compiled):
    """Those of the tensor core's operands and instructions are what the tiles say."""
    config = CONFIGS[name][0]
    k_major = smem_descriptor(leading=16)  # one group of columns: its distance is not used, and 1
    groups = (
        config.tile_dv // config.ctas > COLUMN_STEP
    )  # V's columns come in groups, each with all keys
    assert compiled[name]["descriptors"] == {
        k_major,
        smem_descriptor(leading=config.tile_n * 128) if groups else k_major,
        instruction_descriptor(config, config.tile_n, transposed=False),
        instruction_descriptor(config, config.tile_dv, transposed=True),
    }


@pytest.mark.parametrize("name", {**CONFIGS, **FEATURED})
def test_instructions(name, compiled):
    limits, found = json.loads(LIMITS.read_text("utf-8"))[name], compiled[name]
    for what, limit in limits.items():
        if what in ("kernel", "spills") or what.endswith("loop"):
            assert found[what] <= limit * SLACK, (
                f"{what}: {found[what]}, {limit} when last looked at"
            )


def test_the_limits_are_of_these_configs():
    assert json.loads(LIMITS.read_text("utf-8")).keys() == (CONFIGS | FEATURED).keys()


SIZES = (8, 64, 72, 128)


@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
def test_every_config_fits(causal):
    """More than can be compiled here: head dims, by the graph's sums."""
    sizes = (*SIZES, 136, 192, 200, 256)
    for head_dim, head_dim_v, bf16, rows in product(sizes, sizes, (False, True), (100, 4096)):
        facts = replace(problem(head_dim, head_dim_v, causal, bf16), seqlen_q=rows)
        config = choose_config(facts)[0]
        assert config.tile_d >= head_dim and config.tile_dv >= head_dim_v and config.fits
        check_limits(config)


def test_wide_heads_have_one_q_tile_and_pairs_that_are_filled():
    def choice(rows, head_dim, head_dim_v, **facts):
        config = choose_config(replace(problem(head_dim, head_dim_v, **facts), seqlen_q=rows))[0]
        return config.q_tiles, config.ctas, config.tile_dv, config.tile_n

    assert choice(4096, 192, 128) == (2, 2, 128, 128)
    for dims, tile_dv in (((256, 256), 256), ((200, 64), 128), ((64, 136), 256)):
        assert (
            choice(4096, *dims) == choice(129, *dims) == choice(300, *dims) == (1, 2, tile_dv, 128)
        )
        assert choice(128, *dims) == (1, 1, tile_dv, 64)
    # Two Q tiles would leave sequences two slots of K and V there.
    assert choice(4096, 192, 128, used_k=True)[:2] == (1, 2)
    assert choice(4096, 128, 128, used_k=True)[:2] == (2, 1)


def test_what_does_not_fit_is_refused():
    config = ForwardConfig(True, 128, 128, False, stages=4)
    assert not config.fits and config.graph.smem_bytes > SMEM_LIMIT
    with pytest.raises(ValueError, match="bytes of shared memory, one CTA has 232448"):
        ForwardSm100(config)
    with pytest.raises(Hazard, match="bytes of shared memory"):
        check_limits(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"tile_d": 96}, {"tile_dv": 192}, {"tile_n": 96}, {"stages": 1}, {"o_slots": 3}, {"q_tiles": 3},
        {"tile_d": 320, "q_tiles": 1}, {"tile_dv": 320, "q_tiles": 1},
        {"ctas": 3}, {"ctas": 2, "tile_dv": 64}, {"fixed_shift": True, "bf16": False},
        {"fixed_shift": True, "cu_q": True}, {"poly": 3}, {"head": 128}, {"head": 40}, {"pack": 3}, {"causal": True, "right": True},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_configs(fields):
    with pytest.raises(ValueError):
        ForwardConfig(**{"bf16": True, "tile_d": 128, "tile_dv": 128, "causal": False, **fields})


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"head_dim": 264}, "head_dim 264 exceeds 256"),
        ({"head_dim_v": 264}, "head_dim_v 264 exceeds 256"),
    ],
)
def test_what_is_not_built_says_so(facts, reason):
    assert reason in can_implement(problem(**{"head_dim": 64, "head_dim_v": 64, **facts}))


def test_covers_name_signals_and_arrivals_are_the_threads():
    graph = config_for(128, 128, True).graph
    names = {signal.name: signal for signal in graph.signals}
    assert all(set(signal.covered_by) <= set(names) for signal in graph.signals)
    assert {s.name: s.arrivals for s in graph.signals if s.name.endswith("0")} == {
        "s0": 1, "p0": 256, "t0": 128, "o0": 1, "m0": 128, "l0": 128, "f0": 128,
    }  # fmt: skip
    pair = config_for(128, 128).graph  # threads of both CTAs tell the leader of P
    assert {s.name: s.arrivals for s in pair.signals if s.name in ("s0", "p0", "t0", "m0")} == {
        "s0": 1, "p0": 512, "t0": 256, "m0": 128,
    }  # fmt: skip
    # Softmax finds the other tile's barriers by this distance, and all roles with one tile the other block's.
    wide = config_for(256, 256).graph
    for graph, letters in ((pair, "sptomlf"), (wide, "sptm")):
        names = [signal.name for signal in graph.signals]
        for letter in letters:
            assert names.index(f"{letter}1") - names.index(f"{letter}0") == graph.stride
    assert names[2 * graph.stride :] == ["o0", "l0", "f0"]


@dataclass(frozen=True)
class Ends:
    """A bundle, as roles get them."""

    s: Wait


@cute.jit
def waits_in_a_loop(ends, n: Int32):
    s_signal = ends.s
    for _ in range(n):
        s_signal.wait()


@cute.jit
def waits_through_the_bundle(ends, n: Int32):
    for _ in range(n):
        ends.s.wait()


class OneWait:
    """A kernel that waits for a signal in a loop."""

    def __init__(self, role):
        self.role = role

    @cute.jit
    def __call__(self, n: Int32):
        self.kernel(n).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, n: Int32):
        self.role(Ends(Wait(SmemAllocator().allocate_array(Int64, 1), 0)), n)


def test_a_wait_whose_phase_no_loop_carries_does_not_compile():
    """It would wait for the first phase for ever; without the check it compiles without a word."""
    cute.compile(OneWait(waits_in_a_loop), Int32(1), options="--gpu-arch sm_100a")
    with pytest.raises(TypeError, match="a signal's phase is advanced in a loop that does not"):
        cute.compile(OneWait(waits_through_the_bundle), Int32(1), options="--gpu-arch sm_100a")


if __name__ == "__main__":
    COUNTED = ("kernel", "spills", *(f"{loop} loop" for loop in LOOPS))
    counts = {
        name: {what: found[what] for what in COUNTED}
        for name, found in compile_all({**CONFIGS, **FEATURED}).items()
    }
    LIMITS.write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
