"""What tells mods apart: code, defaults, closures and globals, and nothing else; and what they compile to."""

import functools
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import flash4
from flash4.common import mods
from flash4.jit.cache import entry_name
from flash4.jit.compile import compile_kernel
from flash4.sm90.fwd_config import ForwardConfig
from tests.host.test_dispatch import stand_in_gpu

KERNEL = "flash4.sm90.fwd:ForwardSm90"
SLOPE = 0.5


def scaled(factor):
    return lambda score, *_: factor * score


def named(score, b, h, q, k, info, aux):
    return score + SLOPE * k


def helper(k):
    return k * 2


DEEP = 0.0


def indirect():
    return DEEP


def helped(score, b, h, q, k, info, aux):
    return score + helper(k)


def test_same_code_and_numbers_are_one_mod():
    assert mods.register(scaled(2.0)) == mods.register(scaled(2.0)) > 0
    assert mods.register(functools.partial(named)) == mods.register(functools.partial(named))
    assert mods.register(None) == 0 and mods.function(0) is None
    assert mods.function(mods.register(named))(1.0, 0, 0, 0, 2, None, None) == 1.0 + SLOPE * 2


def test_what_changes_the_code_changes_the_key(monkeypatch):
    keys = [mods.register(scaled(x)) for x in (2.0, 2, 3.0, (1, 2), (2, 1), "a", None, True)]
    keys += [mods.register(named), mods.register(helped), mods.register(helper)]
    keys.append(mods.register(lambda score, *_, factor=1: score * factor))
    keys.append(mods.register(lambda score, *_, factor=2: score * factor))
    keys.append(mods.register(functools.partial(named, aux=1)))
    monkeypatch.setitem(globals(), "SLOPE", 0.25)
    keys.append(mods.register(named))
    monkeypatch.setitem(globals(), "helper", lambda k: k * 3)
    keys.append(mods.register(helped))
    assert len(set(keys)) == len(keys)


def test_numbers_that_change_later_do_not_reach_a_mod(monkeypatch):
    """A backward is traced when the loop that made its forward has gone on."""
    keys = []
    for factor in (3.5, 4.5):
        keys.append(mods.register(lambda score, *_: score * factor))  # noqa: B023
    assert [mods.function(key)(2.0) for key in keys] == [7.0, 9.0]
    monkeypatch.setitem(globals(), "SLOPE", 0.75)
    key = mods.register(functools.partial(named))
    monkeypatch.setitem(globals(), "SLOPE", 0.125)
    assert mods.function(key)(1.0, 0, 0, 0, 2, None, None) == 2.5


def test_helpers_that_change_later_are_noticed(monkeypatch):
    def own(score, *_):
        return score + indirect()

    monkeypatch.setitem(globals(), "DEEP", 1.25)
    key = mods.register(own)
    assert mods.function(key)(1.0) == 2.25
    monkeypatch.setitem(globals(), "DEEP", 2.25)
    with pytest.raises(RuntimeError, match="has changed since its call"):
        mods.function(key)


def test_mods_that_name_themselves_end():
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    assert mods.register(fibonacci) == mods.register(fibonacci)


@pytest.mark.parametrize("value", [torch.zeros(3), np.zeros(3), object()])
def test_what_cannot_be_told_is_refused(value):
    with pytest.raises(TypeError, match="aux_tensors"):
        mods.register(scaled(value))


def test_keys_are_the_same_in_another_process():
    code = "from tests.host import test_mods as t; print(t.mods.register(t.helped), t.mods.register(t.scaled(2.0)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(mods.register(helped)), str(mods.register(scaled(2.0)))]


def test_an_unknown_key_is_named():
    with pytest.raises(KeyError, match="0xabc"):
        mods.function(0xABC)


@pytest.mark.parametrize(
    "aux", [[], [torch.zeros(1)], [torch.zeros(1, 1, 1, 1).long()], [torch.zeros(1, 2).half()] * 8]
)
def test_types_of_aux_tensors_in_one_number(aux):
    kinds = [(mods.AUX_DTYPES.index(x.dtype), x.ndim) for x in aux]
    assert mods.decode_aux(mods.encode_aux(aux)) == kinds


def test_mods_are_in_the_cache_key():
    x = torch.zeros(1, 8, 2, 64, dtype=torch.float16, device="meta")
    configs = [
        flash4.explain(x, x, x, **keywords).config
        for keywords in (
            {},
            {"score_mod": named},
            {"mask_mod": helped},
            {"score_mod": helped},
            {"score_mod": helped, "aux_tensors": [torch.zeros(2, device="meta")]},
            {"score_mod": helped, "aux_tensors": [torch.zeros(2, 2, device="meta")]},
        )
    ]
    assert len({entry_name(KERNEL, config, "sm_90a") for config in configs}) == len(configs)


def branching(score, b, h, q, k, info, aux):
    return score if k > 3 else 0.0


def test_a_mod_that_does_not_trace_is_an_error_before_the_launch():
    config = ForwardConfig(True, 64, 64, 64, 64, False, score_mod=mods.register(branching))
    with pytest.raises(RuntimeError, match="could not compile"):
        compile_kernel(KERNEL, config, "sm_90a")


knobs = types.ModuleType("knobs")
knobs.slope, knobs.helper = 0.1, lambda s: s * 2


class Settings:
    """A class of the user's, with a number that a mod reads."""

    slope = 0.1


def reads_module(s, b, h, i, j, info, aux):
    return s - knobs.slope * (i - j)


def reads_helper(s, b, h, i, j, info, aux):
    return knobs.helper(s)


def reads_class(s, b, h, i, j, info, aux):
    return s * Settings.slope


def reads_info(s, b, h, i, j, info, aux):
    return s + info.seqlen_k


@pytest.mark.parametrize(
    ("mod", "owner", "name", "value"),
    [
        (reads_module, knobs, "slope", 7.5),
        (reads_helper, knobs, "helper", lambda s: s * 3),
        (reads_class, Settings, "slope", 7.5),
    ],
)
def test_what_a_mod_reads_through_a_module_or_class_counts(mod, owner, name, value, monkeypatch):
    """Or a kernel with the old number would be served."""
    before = mods.register(mod)
    assert mods.register(mod) == before
    monkeypatch.setattr(owner, name, value)
    assert mods.register(mod) != before


def test_attributes_are_not_globals(monkeypatch):
    before = mods.register(reads_info)
    monkeypatch.setitem(globals(), "seqlen_k", torch.zeros(3))
    assert mods.register(reads_info) == before


def test_a_module_as_a_whole_and_an_empty_closure_are_refused():
    def whole(s, b, h, i, j, info, aux):
        mine = knobs
        return s * mine.slope

    def early(s, b, h, i, j, info, aux):
        return s * later

    for mod, message in ((whole, "knobs"), (early, "later, which has no value yet")):
        with pytest.raises(TypeError, match=message):
            mods.register(mod)
    later = 1.0
    assert mods.register(early)


@pytest.mark.parametrize("aux", [torch.zeros(1), 0, False, "", {}, torch.ones(4)])
def test_aux_tensors_of_another_kind_are_refused(aux):
    q = torch.randn(1, 8, 2, 64).bfloat16()
    with pytest.raises(TypeError, match="aux_tensors must be a list"):
        flash4.explain(q, q, q, aux_tensors=aux, arch="sm_90a")


def test_out_must_not_be_what_mods_read():
    q = torch.randn(1, 8, 4, 64).bfloat16()
    buffer, weights = torch.empty_like(q), torch.ones(4, requires_grad=True)
    calls = (
        (buffer, [buffer], "shares memory with aux_tensors.0"),
        (torch.empty_like(q), [weights], "not differentiable"),
    )
    for out, aux, message in calls:
        with stand_in_gpu(run=lambda launch: None) as launches:
            with pytest.raises(ValueError, match=message):
                flash4.flash_attn_func(q, q, q, out=out, score_mod=reads_aux, aux_tensors=aux)
        assert not launches


def reads_aux(s, b, h, i, j, info, aux):
    return s + aux[0][h]
