"""Consumers' ends of the rings of K and V, in CuTe.

Both rings have as many slots, and every block passes through both, so the V of a block lies in the slot that has the
number of its K. One number and one phase, carried once, serve both rings. The number is the address of the full barrier
of K's slot: all else is a constant away from it, or a multiple of that address.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cutlass_dsl import T

from flash4.common import numerics
from flash4.common.dsl import check_carried, descriptor_of, inline_ptx, with_descriptor
from flash4.common.graph import BARRIER_BYTES, WARP


def arrive(address, lane, ctas: int):
    """Arrive once for a warp, in each CTA of a cluster: lane i in CTA i.

    Predicated: with a branch, LLVM makes two copies of a wait that follows, one for that lane and one for the others.
    """
    local = "@p mbarrier.arrive.shared.b64 state, [$0];"
    remote = "@p mapa.shared::cluster.u32 there, $0, $1; @p mbarrier.arrive.shared::cluster.b64 _, [there];"
    text = (
        "{ .reg .pred p; .reg .b64 state; .reg .b32 there; setp.lt.s32 p, $1, "
        f"{ctas}; {local if ctas == 1 else remote} }}"
    )
    inline_ptx(None, "r,r,~{memory}", text, address, lane, side_effects=True)


def is_complete(address, phase):
    """Whether a phase of a barrier is complete."""
    text = "mbarrier.test_wait.parity.shared.b64 $0, [$1], $2;"
    return Boolean(
        inline_ptx(T.bool(), "=b,r,r,~{memory}", text, address, phase, side_effects=True)
    )


def wait_unless(known, address, phase):
    """Wait until a phase of a barrier is complete, unless that is known already."""
    text = (
        "{ .reg .pred p; @$0 bra.uni DONE; WAIT: "
        "mbarrier.try_wait.parity.shared.b64 p, [$1], $2, 10000000; "
        "@p bra.uni DONE; bra.uni WAIT; DONE: }"
    )
    inline_ptx(None, "b,r,r,~{memory}", text, known, address, phase, side_effects=True)


@dataclass(frozen=True)
class Barriers:
    """Barriers of the rings of K and V: the full and the empty ones of K, then those of V."""

    first: Int32  # address of the full barrier of K's first slot
    last: Int32  # of its last one
    stages: int
    ctas: int
    lane: Int32  # in the warp

    @property
    def bytes_each(self):
        """Bytes of the full barriers of a ring, or of the empty ones."""
        return self.stages * BARRIER_BYTES


class Slot:
    """A full slot of K or of V."""

    def __init__(self, barriers: Barriers, at, phase, ring: int):
        self.barriers, self.at, self.phase, self.ring = barriers, at, phase, ring

    def release(self):
        """Give the slot back, for this warp."""
        barriers = self.barriers
        empty = self.at + (2 * self.ring + 1) * barriers.bytes_each
        arrive(empty, barriers.lane, barriers.ctas)

    def __extract_mlir_values__(self):
        return [self.at.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Slot(self.barriers, Int32(values[0]), Int32(values[1]), self.ring)


class KConsumer:
    """Consumer's end of the ring of K: the slot that comes next, and whether it is known to be full."""

    def __init__(self, barriers: Barriers, at=None, phase=None, known=None):
        self.barriers = barriers
        self.at = barriers.first if at is None else at
        self.phase = value(0) if phase is None else phase
        self.known = unknown() if known is None else known

    def wait_and_advance(self):
        """Wait until the next slot is full."""
        check_carried(self.phase.ir_value(), "the number of a slot of K")
        barriers, slot = self.barriers, Slot(self.barriers, self.at, self.phase, 0)
        wait_unless(self.known, self.at, self.phase)
        wraps = self.at == barriers.last
        self.at = cutlass.select_(wraps, barriers.first, self.at + BARRIER_BYTES)
        self.phase, self.known = self.phase ^ Int32(wraps), unknown()
        return slot

    def look_ahead(self):
        """Look whether the next slot is full already: then the wait for it takes no time."""
        self.known = is_complete(self.at, self.phase)

    def __extract_mlir_values__(self):
        return [x.ir_value() for x in (self.at, self.phase, self.known)]

    def __new_from_mlir_values__(self, values):
        at, phase, known = values
        return KConsumer(self.barriers, Int32(at), Int32(phase), Boolean(known))


class VConsumer:
    """Consumer's end of the ring of V: whether the slot that was looked at last is known to be full."""

    def __init__(self, barriers: Barriers, known=None):
        self.barriers = barriers
        self.known = unknown() if known is None else known

    def wait_beside(self, k_slot):
        """Wait until the V of the block whose K is, or was, in a slot is there."""
        check_carried(self.known.ir_value(), "whether a slot of V is full")
        wait_unless(self.known, k_slot.at + 2 * self.barriers.bytes_each, k_slot.phase)
        self.known = unknown()
        return Slot(self.barriers, k_slot.at, k_slot.phase, 1)

    def look_ahead(self, k_slot):
        """Look whether V is there already; the next that is waited for must be that one."""
        self.known = is_complete(k_slot.at + 2 * self.barriers.bytes_each, k_slot.phase)

    def __extract_mlir_values__(self):
        return [self.known.ir_value()]

    def __new_from_mlir_values__(self, values):
        return VConsumer(self.barriers, Boolean(values[0]))


def value(number):
    """An Int32 that is an SSA value from the start, so that ``check_carried`` sees where it was made."""
    return Int32(Int32(number).ir_value())


def unknown():
    """False, as an SSA value."""
    return Boolean(Boolean(False).ir_value())


def open_consumers(storage, stages, ctas, lane):
    """Consumers' ends of the rings of K and V whose barriers lie at ``storage``."""
    first = storage.toint()
    last = first + (stages - 1) * BARRIER_BYTES
    barriers = Barriers(numerics.opaque(first), numerics.opaque(last), stages, ctas, lane % WARP)
    return KConsumer(barriers), VConsumer(barriers)


@dataclass(frozen=True)
class RingOperand:
    """An operand of WGMMAs in the slots of K or V.

    Descriptors are kept as a base and a multiple of a barrier's address. Opaque, or LLVM would build them anew, of masks
    and shifts, in every round of the loop.
    """

    fragment: cute.Tensor  # (MMA, MMA_N, MMA_K, stages)
    base: Int32
    high: Int32
    step: int  # of the descriptor, for a byte of a barrier's address

    @staticmethod
    def of(fragment, barriers: Barriers):
        """Derive it from a fragment."""
        first = descriptor_of(fragment)
        last = cute.size(fragment, mode=[3]) - 1
        step = cute.crd2idx((0, 0, 0, last), fragment.layout) // max(last, 1) // BARRIER_BYTES
        base = numerics.opaque(Int32(first)) - barriers.first * step
        high = cute.arch.warp_redux_sync(Int32(first >> 32), "or")
        return RingOperand(fragment, numerics.opaque(base), high, step)

    def steps(self, slot):
        """Fragments of a slot, one to each WGMMA."""
        low = self.base + slot.at * self.step
        first = pair(low, self.high)
        one = self.fragment[None, None, 0, 0]
        return [with_descriptor(one, first + offset) for offset in step_offsets(self.fragment)]


def pair(low, high):
    """Int64 of two Int32."""
    return Int64(inline_ptx(T.i64(), "=l,r,r", "mov.b64 $0, {$1, $2};", low, high))


def step_offsets(fragment):
    """From the descriptor of a slot to those of its WGMMAs, in descriptor units."""
    steps = cute.size(fragment.shape[2])
    return [cute.crd2idx((0, 0, k, 0), fragment.layout) for k in range(steps)]


def slot_steps(fragment, index, keep: bool):
    """Fragments of slot ``index``, one to each WGMMA.

    Worked out once, where the index is known, and kept in registers; or only the first, where these are scarce.
    """
    first = descriptor_of(fragment) + Int64(cute.crd2idx((0, 0, 0, index), fragment.layout))
    one, offsets = fragment[None, None, 0, 0], step_offsets(fragment)
    if keep:
        return [with_descriptor(one, numerics.kept(first + offset)) for offset in offsets]
    first = numerics.kept(first)
    return [with_descriptor(one, first + offset) for offset in offsets]
