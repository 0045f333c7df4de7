"""Consumers' ends of the Hopper forward's rings, and its divisors: traced, and read off what the compiler folds."""

import random
import re
import traceback

import pytest

from flash4.common.graph import BARRIER_BYTES
from flash4.jit.compile import compile_kernel
from flash4.sim.machine import Machine
from flash4.sim.rings import End, Ring
from tests.host.test_geometry import stored_literals
from tests.host.test_sim import Spec

FIRST = 4096  # address of K's first barrier
LANE, CTAS = 5, 2


def blocks_of(k_consumer, v_consumer, count):
    """Slots of K and V, in the order in which a tile's role takes them; with looks at every second one."""
    taken, before = [], None
    for i in range(count):
        k_slot = k_consumer.wait_and_advance()
        taken.append(("k", k_slot))
        if i % 2:
            k_consumer.look_ahead()
            v_consumer.look_ahead(k_slot if before is None else before)
        if before is not None:
            taken.append(("v", v_consumer.wait_beside(before)))
        before = k_slot
    taken.append(("v", v_consumer.wait_beside(before)))
    return taken


def storing(values_of):
    """Kernel that stores a list of int32."""
    import cutlass
    import cutlass.cute as cute

    class Storing:
        def fake_arguments(self):
            size = cute.sym_int()
            out = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (size,), assumed_align=16)
            return out, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)

        @cute.jit
        def __call__(self, out: cute.Tensor, stream):
            self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

        @cute.kernel
        def kernel(self, out: cute.Tensor):
            self.store(out)

        def store(self, out):
            for i, value in enumerate(values_of()):
                out[i] = cutlass.Int32(value)

    return Storing()


def traced_slots(facts):
    """Kernel that stores the addresses that waits, looks and releases of some blocks are about, and their phases."""
    import cutlass

    from flash4.sm90 import fwd_ends

    stages, count = facts
    seen = []

    def values():
        first, last = (cutlass.Int32(FIRST + BARRIER_BYTES * i) for i in (0, stages - 1))
        barriers = fwd_ends.Barriers(first, last, stages, CTAS, cutlass.Int32(LANE))
        ends = fwd_ends.KConsumer(barriers), fwd_ends.VConsumer(barriers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fwd_ends, "wait_unless", lambda known, *where: seen.extend(where))
            patch.setattr(fwd_ends, "is_complete", lambda *where: cutlass.Boolean(False))
            for _, slot in blocks_of(*ends, count):
                patch.setattr(fwd_ends, "arrive", lambda address, *_: seen.append(address))
                slot.release()
        return seen

    return storing(values)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_slots_are_those_of_the_simulators_ends(stages, tmp_path):
    """K and V, over three rounds of the rings: which barriers are waited for, in which phase, and given back."""
    count = 3 * stages + 1
    compiled = compile_kernel(f"{__name__}:traced_slots", (stages, count), "sm_90a", str(tmp_path))
    machine, expected, slots = Machine(0), [], []
    rings = {name: Ring(machine, Spec(name, stages), 1) for name in "kv"}
    firsts = {"k": FIRST, "v": FIRST + 2 * stages * BARRIER_BYTES}

    def role(k_end, v_end):
        k_end._wait = v_end._wait = lambda *_: None
        k_end._look = v_end._look = lambda *_: None
        slots.extend(blocks_of(k_end, v_end, count))

    role(*(End(ring) for ring in rings.values()))
    full = [(firsts[name] + BARRIER_BYTES * slot.index, slot.use % 2) for name, slot in slots]
    expected = [number for where in full for number in where]
    expected += [address + BARRIER_BYTES * stages for address, _ in full]
    assert stored_literals(compiled.__ptx__) == dict(enumerate(expected))


def forgetful(loses):
    """Kernel whose loop advances an end that it does not carry."""
    import cutlass
    import cutlass.cute as cute

    from flash4.sm90 import fwd_ends

    class Forgetful:
        def fake_arguments(self):
            out = cute.runtime.make_fake_compact_tensor(
                cutlass.Int32, (cute.sym_int(),), assumed_align=16
            )
            return out, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)

        @cute.jit
        def __call__(self, out: cute.Tensor, stream):
            self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

        @cute.kernel
        def kernel(self, out: cute.Tensor):
            barriers = fwd_ends.Barriers(cutlass.Int32(0), cutlass.Int32(8), 2, 1, cutlass.Int32(0))
            k_consumer, v_consumer = fwd_ends.KConsumer(barriers), fwd_ends.VConsumer(barriers)
            k_slot = k_consumer.wait_and_advance()
            k_kept, v_kept = (k_consumer,), (v_consumer,)
            for _ in range(out.shape[0]):
                if cutlass.const_expr(loses == "k"):
                    k_kept[0].wait_and_advance()
                else:
                    k_slot = k_consumer.wait_and_advance()
                if cutlass.const_expr(loses == "v"):
                    v_kept[0].wait_beside(k_slot)
                else:
                    v_consumer.wait_beside(k_slot)

    return Forgetful()


def test_ends_that_a_loop_carries_compile(tmp_path):
    compiled = compile_kernel(f"{__name__}:forgetful", "", "sm_90a", str(tmp_path))
    assert compiled.__ptx__.count("mbarrier.try_wait") >= 3


@pytest.mark.parametrize(("loses", "what"), [("k", "slot of K"), ("v", "slot of V")])
def test_an_end_that_a_loop_does_not_carry_is_refused(loses, what, tmp_path):
    with pytest.raises(RuntimeError) as error:
        compile_kernel(f"{__name__}:forgetful", loses, "sm_90a", str(tmp_path))
    told = "".join(traceback.format_exception(error.value))
    assert re.search(f"TypeError: .*{what}.* is advanced in a loop that does not carry it", told)


MOST = 2**31 - 1
NUMBERS = sorted(
    {1, 2, 3, 5, 6, 7, 9, 11, 13, 131, 132, 46_341, MOST}
    | {2**i + d for i in (4, 15, 16, 23, 30) for d in (-1, 0, 1)}
)


def indices_of(number, random):
    """Multiples of a divisor and their neighbours, the largest ones among them, and any."""
    multiples = {number * i for i in (0, 1, 2, MOST // number, MOST // number // 2)}
    found = {m + d for m in multiples for d in (-1, 0, 1)} | {MOST, MOST - 1}
    found |= {random.randrange(MOST) for _ in range(3)}
    return sorted(x for x in found if 0 <= x <= MOST)


def division_cases():
    """(index, divisor)."""
    pick = random.Random(0)
    return [(index, number) for number in NUMBERS for index in indices_of(number, pick)]


def traced_quotients(cases):
    """Kernel that stores the quotients of all cases."""
    from cutlass import Int32

    from flash4.common.numerics import Divisor

    return storing(lambda: [Int32(index) // Divisor(Int32(number)) for index, number in cases])


def test_quotients_are_exact_for_all_int32(tmp_path):
    cases = division_cases()
    compiled = compile_kernel(f"{__name__}:traced_quotients", cases, "sm_90a", str(tmp_path))
    expected = [index // number for index, number in cases]
    assert stored_literals(compiled.__ptx__) == dict(enumerate(expected))
