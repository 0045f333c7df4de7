"""Ends of rings and signals as the roles of the Blackwell backward get them.

An end that waits counts its turns: slot and parity follow from the count, and a loop that does not carry it is a compile
error. Threads arrive once a warp.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import if_generate
from cutlass.experimental import primitives

from flash4.common.dsl import check_carried
from flash4.sm100.bwd_graph import LEADER, UMMA, Ring

LEADING_CTA, BOTH_CTAS = 0, 0b11  # rank, and mask, in a pair
# Bit of a count of turns that is never set: 0 for the compiler to work with, and nothing that it can see through.
NEVER = 30


class Plain:
    """An end without a state."""

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


class Nothing(Plain):
    """An end that this kind of kernel does not need."""

    def post(self):
        """Nothing."""

    def wait(self):
        """Nothing."""


class Raise(Plain):
    """Raisers' end of a signal, or of a slot that is given back."""

    def __init__(self, barrier, kind: str, ctas: int):
        self.barrier, self.kind, self.ctas = barrier, kind, ctas

    def post(self):
        """Arrive: each warp of the role now, or the tensor core once its MMAs so far are done, in both CTAs."""
        if self.kind == UMMA:
            with cute.arch.elect_one():
                if self.ctas > 1:
                    tcgen05.commit(self.barrier, BOTH_CTAS, tcgen05.CtaGroup.TWO)
                else:
                    tcgen05.commit(self.barrier)
            return
        primitives.tcgen05_fence("before_thread_sync")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            remote = LEADING_CTA if self.kind == LEADER and self.ctas > 1 else None
            cute.arch.mbarrier_arrive(self.barrier, remote)


class Meeting(Plain):
    """Where the warps of a role meet."""

    def __init__(self, number: int, threads: int):
        self.number, self.threads = number, threads

    def sync(self):
        """Wait for the other warps."""
        cute.arch.barrier(barrier_id=self.number, number_of_threads=self.threads)


class Turns:
    """A count of turns, which loops carry."""

    def __init__(self, turn):
        # An SSA value from the start, so that the check below sees where it was made.
        self.turn = Int32(Int32(turn).ir_value())

    def __extract_mlir_values__(self):
        return [self.turn.ir_value()]

    def __new_from_mlir_values__(self, values):
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, turn=Int32(values[0]))
        return new

    def next_turn(self, stages: int):
        """(slot, parity) of this turn; goes on to the next."""
        check_carried(self.turn.ir_value(), "a count of turns")
        turn, self.turn = self.turn, self.turn + 1
        return (turn & 1, (turn >> 1) & 1) if stages == 2 else (0, turn & 1)


class Slot:
    """A slot.

    Attributes:
        index: of the slot.
        at: the same for verbs of the tensor core: of a ring of one slot a 0 that the compiler cannot see through, or
            it would keep the descriptors of all operands in registers around the loop.
        barrier: that counts its bytes.
        freed: end that gives it back, or None.
    """

    def __init__(self, index, at, barrier=None, freed=None):
        self.index, self.at, self.barrier, self.freed = index, at, barrier, freed

    def __extract_mlir_values__(self):
        return [self.at.ir_value()]

    def __new_from_mlir_values__(self, values):
        at = Int32(values[0])
        return Slot(self.index if isinstance(self.index, int) else at, at, self.barrier, self.freed)

    def release(self):
        """Give it back."""
        Raise(self.freed.barrier + self.index, self.freed.kind, self.freed.ctas).post()


class Wait(Turns):
    """Waiter's end of a signal; a late one's first wait passes."""

    def __init__(self, barrier, late: bool = False):
        super().__init__(int(late))
        self.barrier = barrier

    def wait(self):
        """Wait for the phase and go on to the next; returns what stands for the slot that the signal tells of."""
        _, parity = self.next_turn(1)
        cute.arch.mbarrier_wait(self.barrier, parity)
        primitives.tcgen05_fence("after_thread_sync")
        return Slot(0, self.turn >> NEVER)


class Told(Wait):
    """One that tells of what other kernels have a ring for."""

    def wait_and_advance(self):
        """Wait for the phase."""
        return self.wait()


class Bytes(Wait):
    """A signal that its waiter arms, and that bytes of a copy from the peer complete."""

    def expect(self, nbytes: int):
        """Arm it."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier, nbytes)


class Producer(Turns):
    """``load``'s end of a ring."""

    def __init__(self, ring: Ring, full, empty, ctas: int, rank):
        super().__init__(ring.stages)  # all slots are empty at first
        self.ring, self.full, self.empty = ring, full, empty
        self.ctas, self.rank = ctas if ring.shared else 1, rank

    def acquire_and_advance(self, nbytes: int):
        """Wait until the next slot is free, and announce bytes: in a pair, as its leader, those of both CTAs."""
        index, parity = self.next_turn(self.ring.stages)
        if self.empty is not None:
            cute.arch.mbarrier_wait(self.empty + index, parity)
        barrier = self.full + index

        def announce():
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes * self.ctas)

        if self.ctas > 1:
            if_generate(self.rank == LEADING_CTA, announce)
        else:
            announce()
        return Slot(index, Int32(index), barrier)


class Consumer(Turns):
    """A role's end of a ring that it reads."""

    def __init__(self, ring: Ring, full, freed=None):
        super().__init__(0)
        self.ring, self.full, self.freed = ring, full, freed

    def wait_and_advance(self):
        """Wait until the next slot is full."""
        index, parity = self.next_turn(self.ring.stages)
        cute.arch.mbarrier_wait(self.full + index, parity)
        return self._slot(index)

    def _slot(self, index):
        at = index if self.ring.stages == 2 else self.turn >> NEVER
        return Slot(index, at, self.full + index, self.freed)


class Cursor(Consumer):
    """A second end, of slots that have been waited for before."""

    def advance(self):
        """The next slot."""
        index, _ = self.next_turn(self.ring.stages)
        return self._slot(index)


@dataclass(frozen=True)
class LoadEnds:
    """Ends of the role ``load``: rings, and of a pair what tells it that their slots are free."""

    k: Producer
    v: Producer
    stat: Producer
    q: object = None
    do: object = None
    kt: object = None
    a: object = None
    b: object = None
    s: object = None
    dp: object = None


@dataclass(frozen=True)
class MmaEnds:
    """Ends of the role ``mma``; None where one CTA, or a pair, has no such edge."""

    k: Consumer
    v: Consumer
    s: Raise
    p: Wait
    dp: Raise
    dq: Raise
    r: Wait
    dv: Raise
    dk: Raise
    q: object = None
    qt: object = None
    do: object = None
    dot: object = None
    ds: object = None
    kt: object = None
    a: object = None
    b: object = None
    early: object = None
    dst: object = None
    y: object = None


@dataclass(frozen=True)
class ComputeEnds:
    """Ends of the role ``compute``; ``Nothing`` where only a pair has such an edge."""

    stat: Consumer
    s: Wait
    early: object
    p: Raise
    dp: Wait
    dst: object
    free: object
    ds: Raise
    dv: Wait
    dk: Wait
    k_free: Raise
    meeting: Meeting
    v: object = None
    v_free: object = None
    vt: object = None


@dataclass(frozen=True)
class ReduceEnds:
    """Ends of the role ``reduce``."""

    dq: Wait
    r: Raise
    meeting: Meeting


@dataclass(frozen=True)
class RelayEnds:
    """Ends of the role ``relay``."""

    ds: Wait
    x: Bytes
    y: Raise
