"""What tells mods apart: code, defaults, closures and globals, and nothing else; and what they compile to."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch

import flash4
from flash4.common import mods
from flash4.jit.cache import entry_name
from flash4.jit.compile import compile_kernel
from flash4.sm90.fwd_config import ForwardConfig

KERNEL = "flash4.sm90.fwd:ForwardSm90"
SLOPE = 0.5


def scaled(factor):
    return lambda score, *_: factor * score


def named(score, b, h, q, k, info, aux):
    return score + SLOPE * k


def helper(k):
    return k * 2


def helped(score, b, h, q, k, info, aux):
    return score + helper(k)


def test_same_code_and_numbers_are_one_mod():
    assert mods.register(scaled(2.0)) == mods.register(scaled(2.0)) > 0
    assert mods.register(functools.partial(named)) == mods.register(functools.partial(named))
    assert mods.register(None) == 0 and mods.function(0) is None
    assert mods.function(mods.register(named)) is named


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
