"""Ends of rings and signals as the roles of the Blackwell forward get them.

A signal is one mbarrier. The raisers' end posts: threads arrive, or the tensor core does when it is through with what
was issued. The waiter's end owns the phase.
"""

from dataclasses import dataclass

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.experimental import primitives

from flash4.common.dsl import check_carried
from flash4.sm100.fwd_graph import LEADER, TMA, UMMA, Ring

LEADING_CTA, BOTH_CTAS = 0, 0b11  # rank, and mask, in a pair


class Raise:
    """Raisers' end of a signal, or of the two of blocks by turns, whose barriers are ``stride`` apart."""

    def __init__(self, barrier, kind: str, ctas: int, stride: int = 0):
        self.barrier, self.kind, self.ctas, self.stride = barrier, kind, ctas, stride

    def post(self, buffer=0):
        """Arrive: all threads of the role now, or the tensor core once its MMAs so far are done, in both CTAs."""
        barrier = self.barrier + buffer * self.stride
        if self.kind == UMMA:
            with cute.arch.elect_one():
                if self.ctas > 1:
                    tcgen05.commit(barrier, BOTH_CTAS, tcgen05.CtaGroup.TWO)
                else:
                    tcgen05.commit(barrier)
        else:
            primitives.tcgen05_fence("before_thread_sync")
            cute.arch.mbarrier_arrive(barrier, LEADING_CTA if self.kind == LEADER else None)

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


class Wait:
    """Waiter's end of a signal; begins at phase 0, or with a credit at the phase that is complete from the start."""

    def __init__(self, barrier, phase):
        # An SSA value from the start, so that the check below sees where it was made.
        self.barrier, self.phase = barrier, Int32(Int32(phase).ir_value())

    def wait(self):
        """Wait for the phase and go on to the next."""
        check_carried(self.phase.ir_value(), "a signal's phase")
        cute.arch.mbarrier_wait(self.barrier, self.phase)
        primitives.tcgen05_fence("after_thread_sync")
        self.phase = self.phase ^ 1

    def __extract_mlir_values__(self):
        return [self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Wait(self.barrier, Int32(values[0]))


class WaitByTurns:
    """Waiter's end of two signals of blocks by turns, whose barriers are ``stride`` apart; the first comes first."""

    def __init__(self, barrier, stride: int, buffer=0, phase=0):
        self.barrier, self.stride = barrier, stride
        self.buffer, self.phase = (Int32(Int32(x).ir_value()) for x in (buffer, phase))

    def wait_and_advance(self):
        """Wait for the signal whose turn it is; returns which of the two that is."""
        check_carried(self.phase.ir_value(), "a signal's phase")
        buffer = self.buffer
        cute.arch.mbarrier_wait(self.barrier + buffer * self.stride, self.phase)
        primitives.tcgen05_fence("after_thread_sync")
        self.buffer, self.phase = buffer ^ 1, self.phase ^ buffer
        return buffer

    def __extract_mlir_values__(self):
        return [self.buffer.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return WaitByTurns(self.barrier, self.stride, *(Int32(value) for value in values))


class TmaUmma(pipeline.PipelineTmaUmma):
    """The DSL's ring, but who fills a slot announces its bytes: K and V have not the same."""

    def producer_acquire(self, state, try_acquire_token=None, *, loc=None, ip=None):
        """Wait until a slot is empty."""
        self.sync_object_empty.wait(state.index, state.phase, loc=loc, ip=ip)

    def producer_commit(self, state, *, loc=None, ip=None):
        """Nothing: the bytes of the copies complete a slot."""


def open_ring(ring: Ring, barriers, ctas: int):
    """Producer's and consumer's end of a ring."""
    groups = [pipeline.CooperativeGroup(pipeline.Agent.Thread, n) for n in ring.arrivals]
    arguments = {
        "num_stages": ring.stages,
        "producer_group": groups[0],
        "consumer_group": groups[1],
        "barrier_storage": barriers,
        "defer_sync": True,
    }
    if ring.kinds[0] != TMA:
        return pipeline.PipelineAsync.create(**arguments).make_participants()
    layout = cute.make_layout((ctas, 1, 1, 1))
    made = pipeline.PipelineTmaUmma.create(**arguments, tx_count=0, cta_layout_vmnk=layout)
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    return TmaUmma(**fields).make_participants()


@dataclass(frozen=True)
class MmaEnds:
    """Ends of the role ``mma``."""

    q: object
    kv: object
    s0: Raise
    s1: Raise
    o0: Raise
    o1: Raise
    p0: Wait
    p1: Wait
    t0: Wait
    t1: Wait


@dataclass(frozen=True)
class WideMmaEnds:
    """Ends of the role ``mma`` with one Q tile."""

    q: object
    kv: object
    s: Raise
    p: WaitByTurns
    t: WaitByTurns
    o: Raise


@dataclass(frozen=True)
class WideCorrectionEnds:
    """Ends of the role ``correction`` with one Q tile."""

    slots: object  # of O in shared memory
    m: WaitByTurns
    p: Raise
    o: Wait
    l: Wait
    f: Raise


@dataclass(frozen=True)
class SoftmaxEnds:
    """Ends of one warpgroup of the role ``softmax``; with one Q tile s is of blocks by turns."""

    s: Wait | WaitByTurns
    p: Raise
    t: Raise
    m: Raise
    l: Raise
    f: Wait


@dataclass(frozen=True)
class CorrectionEnds:
    """Ends of the role ``correction``."""

    o: object
    m0: Wait
    m1: Wait
    o0: Wait
    o1: Wait
    p0: Raise
    p1: Raise
    l0: Wait
    l1: Wait
    f0: Raise
    f1: Raise
