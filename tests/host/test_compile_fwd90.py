"""The Hopper forward compiles for every kind of config that ships, within limits that are checked in.

Registers, spills, waits and MMAs must be what config and schedule say. Instruction counts are those of one compiler;
``fwd90_limits.json`` holds them, and ``python -m tests.host.test_compile_fwd90`` writes it anew after a change of the
kernel that is meant to change them.
"""

import ast
import inspect
import json
import multiprocessing
import tempfile
import textwrap
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from flash4.common import mods
from flash4.jit import compile as jit_compile
from flash4.jit.inspect import Resources, count_resources, resources
from flash4.problem import AttentionProblem
from flash4.sm90.fwd_config import (
    MMA_ROWS,
    SMEM_ALIGN,
    SMEM_LIMIT,
    ForwardConfig,
    choose_config,
)
from flash4.sm90.fwd_roles import ForwardRoles
from tests import strategies

LIMITS = Path(__file__).with_name("fwd90_limits.json")
SLACK = 1.01  # of the instruction counts
WORKERS = 2
MMA_K = 16  # columns of A that one WGMMA multiplies
LONG = 1 << 20

SQUARE = (64, 96, 128, 160, 192, 224, 256)
MASKS = {"full": False, "causal": True}


WINDOWS = {
    "left": {"window_left": True},
    "right": {"window_right": True},
    "both sides": {"window_left": True, "window_right": True},
    "causal, left": {"causal": True, "window_left": True},
}


def config_for(head_dim, head_dim_v, causal=False, *, seqlen=4096, bf16=True, **facts):
    """Config that a call with these facts gets; pack and negate are set as a call may set them."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    changes = {name: facts.pop(name) for name in ("pack", "negate") if name in facts}
    problem = AttentionProblem(
        dtype, 1, seqlen, seqlen, 1, 1, head_dim, head_dim_v, causal, **facts
    )
    return replace(choose_config(problem)[0], **changes)


def shipped() -> dict[str, ForwardConfig]:
    """Configs to compile, by name."""
    named = {
        f"{d}/{d} {mask}": config_for(d, d, causal)
        for d in SQUARE
        for mask, causal in MASKS.items()
    }
    for d, dv, mask in (
        (192, 128, "full"),
        (192, 128, "causal"),
        (128, 64, "causal"),
        (64, 128, "full"),
        (256, 64, "full"),
        (64, 256, "causal"),
    ):
        named[f"{d}/{dv} {mask}"] = config_for(d, dv, MASKS[mask])
    named["64/64 full, fp16"] = config_for(64, 64, False, bf16=False)
    named["128/128 causal, fp16"] = config_for(128, 128, True, bf16=False)
    named["128/128 causal, pack 4"] = config_for(128, 128, True, pack=4)
    named["128/128 full, negate"] = config_for(128, 128, False, negate=True)
    return named | with_features() | of_two_ctas()


def of_two_ctas() -> dict[str, ForwardConfig]:
    """Configs of tiles that two CTAs share, by name."""
    kinds = {
        "256/256 full": config_for(256, 256, seqlen=LONG),
        "256/256 causal": config_for(256, 256, True, seqlen=LONG),
        "192/128 full": config_for(192, 128, seqlen=LONG),
        "192/128 causal": config_for(192, 128, True, seqlen=LONG),
        "64/256 causal": config_for(64, 256, True, seqlen=LONG),
        "160/160 causal, fp16": config_for(160, 160, True, seqlen=LONG, bf16=False),
        "224/224 full, fp16": config_for(224, 224, seqlen=LONG, bf16=False),
        "256/256 window right, cap, sink and slopes": config_for(
            256, 256, seqlen=LONG, **WINDOWS["right"], softcap=True, sink=True, alibi=True, pack=4
        ),
    }
    return {f"{name}, two CTAs": config for name, config in kinds.items()}


def with_features() -> dict[str, ForwardConfig]:
    """Configs of windows, caps and sinks, by name."""
    cap_and_sink = {"softcap": True, "sink": True}
    named = {
        f"128/128 window {name}": config_for(128, 128, **w)
        for name, w in WINDOWS.items()
        if name in ("left", "causal, left")
    }
    named |= {
        f"{d}/{dv} window both sides, cap and sink": config_for(
            d, dv, **WINDOWS["both sides"], **cap_and_sink, pack=8, negate=True
        )
        for d, dv in ((64, 64), (128, 128), (160, 192))
    }
    named["64/64 window causal, left"] = config_for(64, 64, **WINDOWS["causal, left"])
    named["128/128 full, cap"] = config_for(128, 128, softcap=True)
    named["64/64 causal, cap"] = config_for(64, 64, True, softcap=True)
    named["96/96 causal, cap"] = config_for(96, 96, True, softcap=True)
    named["128/128 window right, cap"] = config_for(128, 128, softcap=True, **WINDOWS["right"])
    named["128/128 causal, cap, packed"] = config_for(
        128, 128, True, softcap=True, cu_q=True, cu_k=True, pack=4
    )
    named["192/192 causal, cap"] = config_for(192, 192, True, softcap=True)
    named["128/128 causal, cap"] = config_for(128, 128, True, softcap=True)
    named["192/128 causal, cap"] = config_for(192, 128, True, softcap=True)
    named["128/128 causal, alibi"] = config_for(128, 128, True, alibi=True)
    named |= {
        f"{d}/{d} causal, cap and alibi": config_for(d, d, True, softcap=True, alibi=True, pack=4)
        for d in (64, 128, 256)
    }
    named["128/128 causal, sink"] = config_for(128, 128, True, sink=True)
    named["128/128 full, alibi"] = config_for(128, 128, alibi=True)
    named["64/64 causal, alibi"] = config_for(64, 64, True, alibi=True)
    both = {
        "score_mod": mods.register(strategies.bias_of_heads),
        "mask_mod": mods.register(strategies.same_document),
        "aux": mods.encode_aux([torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32)]),
    }
    named |= {f"{d}/{d} causal, mods": config_for(d, d, True, **both) for d in (64, 128)}
    packed = {"cu_q": True, "cu_k": True}
    every = {**packed, "used_q": True, "used_k": True}
    named |= {
        f"{d}/{dv} {mask}, packed": config_for(d, dv, MASKS[mask], **packed)
        for d, dv, mask in (
            (64, 64, "causal"),
            (128, 128, "full"),
            (128, 128, "causal"),
            (192, 128, "full"),
            (256, 256, "causal"),
        )
    }
    named |= {
        f"{d}/{dv} everything": config_for(
            d, dv, **WINDOWS["causal, left"], **cap_and_sink, **every, alibi=True, pack=4
        )
        for d, dv in ((64, 64), (128, 128), (192, 192), (256, 256))
    }
    named["128/128 causal, keys in use"] = config_for(128, 128, True, used_k=True, pack=8)
    return named


CONFIGS = shipped()
TOO_LARGE = ForwardConfig(True, 128, 256, tile_m=128, tile_n=128, causal=True, stages=1)


def compile_one(config: ForwardConfig) -> Resources:
    """Compile a config and count; runs in a worker process. The compiler must have nothing to warn of."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        jit_compile.compile_kernel("flash4.sm90.fwd:ForwardSm90", config, "sm_90a", folder)
        (cubin,) = Path(folder).glob("*.cubin")
        return resources(cubin)


def compile_all(configs: dict[str, ForwardConfig]) -> dict[str, Resources]:
    """Resources of configs by name; two processes, because tracing holds the interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        return dict(zip(configs, pool.map(compile_one, configs.values()), strict=True))


@pytest.fixture(scope="module")
def compiled():
    return compile_all({**CONFIGS, "too large": TOO_LARGE})


def calls(role, phases: int) -> dict[str, int]:
    """How often each verb of ``ops`` stands in the code of a role: once per phase in the loop over phases."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(role))).body
    found = {}

    def count(node, times):
        if isinstance(node, ast.For) and "phases" in ast.unparse(node.iter):
            times *= phases
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("ops."):
            verb = node.func.attr
            found[verb] = found.get(verb, 0) + times
        for child in ast.iter_child_nodes(node):
            count(child, times)

    count(function, 1)
    return found


def expected(config: ForwardConfig) -> dict[str, int]:
    """Counts that follow from schedule and tiles."""
    later = 1 + config.left  # phases when every row has seen a key, twice with a fixed shift
    phases = (config.causal or config.right) + later * (1 + config.fixed_shift)
    verbs = calls(ForwardRoles.mma, phases)
    exponentials = config.tile_n * MMA_ROWS // 128 * (1 + config.softcap)  # of a block
    exponentials += 2  # one correction for each row
    # Which ptxas computes twice rather than keep: in masked blocks, and more where features crowd the registers.
    again = (64 if config.varlen and config.alibi else 8) * config.softcap
    return {
        "waits": verbs["wait_mma"],
        "hgmma": verbs["qk"] * (config.tile_d // MMA_K) + verbs["pv"] * (config.tile_n // MMA_K),
        "exp2": (verbs["softmax_first"] + verbs["softmax"]) * exponentials
        + 4 * config.sink
        + again
        # A part of a block may be done again, and has a limit for each row.
        + later * config.near_first * (config.tile_n * MMA_ROWS // 128 + 2)
        - 2 * later * config.fixed_shift,  # nothing to correct in those phases
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_resources(name, compiled):
    config, found = CONFIGS[name], compiled[name]
    assert found.spill_loads == found.spill_stores == 0, f"spills: {found}"
    assert not found.serialised, f"MMAs are serialised: {found}"
    wanted = expected(config)
    assert found.waits == wanted["waits"], found
    assert found.hgmma == wanted["hgmma"], found
    assert found.exp2 <= wanted["exp2"], found
    # ptxas gives every thread its share of the file; roles reallocate no more than that later.
    graph = config.graph
    assert found.registers * graph.threads == graph.launch_registers >= graph.registers, found


@pytest.mark.parametrize("name", CONFIGS)
def test_instructions(name, compiled):
    limit = json.loads(LIMITS.read_text("utf-8"))[name]
    found = compiled[name].instructions
    assert found <= limit * SLACK, f"{found} instructions, {limit} when they were last looked at"


def test_too_large_a_tile_is_noticed(compiled):
    """Accumulators that do not fit compile without a word."""
    found = compiled["too large"]
    assert found.spill_loads and found.spill_stores and found.serialised, found


def test_the_limits_are_of_these_configs():
    assert json.loads(LIMITS.read_text("utf-8")).keys() == CONFIGS.keys()


@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
def test_every_config_fits(causal):
    """More than can be compiled here: all head dims, by the graph's sums."""
    for head_dim, head_dim_v, seqlen in product(SQUARE, SQUARE, (128, LONG)):
        graph = config_for(head_dim, head_dim_v, causal, seqlen=seqlen).graph
        where = f"{head_dim}/{head_dim_v}"
        assert graph.smem_bytes + SMEM_ALIGN <= SMEM_LIMIT, where


@pytest.mark.parametrize("packed", [*product((False, True), repeat=2)])
def test_a_side_that_is_packed_alone_has_a_batch_of_its_own(packed):
    """Sizes that a launch checks against one another are those that are equal."""
    from flash4.sm90.fwd import ForwardSm90

    config = config_for(64, 64, cu_q=packed[0], cu_k=packed[1])
    q, k, v, out, lse, *_ = ForwardSm90(config).fake_arguments()[0]
    assert k.shape[0] is v.shape[0] and q.shape[0] is out.shape[0] is lse.shape[0]
    assert (q.shape[0] is k.shape[0]) == (packed[0] == packed[1])


@pytest.mark.parametrize("seqlen", [1, LONG])
@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
def test_lengths_choose_no_config_that_is_not_compiled_here(causal, seqlen):
    for head_dim in SQUARE:
        assert config_for(head_dim, head_dim, causal, seqlen=seqlen) in CONFIGS.values()


def test_verbs_are_counted_once_per_phase():
    def role(ops):
        ops.wait_mma(0)
        for phase in ops.phases(0):
            for _ in range(phase):
                ops.wait_mma(1)

    assert calls(role, 3) == {"wait_mma": 4, "phases": 3}


SASS = """
	//----- nvinfo : EIATTR_REGCOUNT
        /*0004*/ 	.word	index@(kernel)
        /*0008*/ 	.word	0x000000a8
.text.kernel:
        /*0010*/                   LDC R1, c[0x0][0x28] ;
        /*0020*/               @P0 LDL.64 R2, [R1] ;
        /*0030*/              @!P1 STL [R1+0x8], R2 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR44], RZ, !UPT, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   MUFU.EX2 R3, R4 ;
        /*0070*/                   MUFU.RCP R3, R4 ;
        /*0080*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0090*/                   NOP ;
"""


def test_counting():
    found = count_resources(SASS)
    assert found == Resources(
        registers=168,
        instructions=8,
        spill_loads=1,
        spill_stores=1,
        hgmma=1,
        waits=1,
        exp2=1,
    )
    assert found.serialised, "as many waits as MMAs"
    assert not replace(found, hgmma=2).serialised
    assert not replace(found, hgmma=0, waits=0).serialised


if __name__ == "__main__":
    counts = {name: found.instructions for name, found in compile_all(CONFIGS).items()}
    LIMITS.write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
