"""The forward schedule that FlashAttention-4 has published for Blackwell, in our own words, to calibrate the clock with.

What is public of it: two Q tiles, a ring that K and V share, S and P in the same columns of tensor memory, P handed over as
three quarters and a rest, a row's sum taken after P is out, a correction warpgroup that rescales O where a maximum grew by
2^8. Without a mask pairs of persistent CTAs; with one, single CTAs of one tile each, the longest first. Softmax, correction
and store are then those of our own roles, with a look at every maximum.

``python -m flash4.sim.sm100_published`` prints published speeds, what the model makes of them, and of our own kernel.
"""

from dataclasses import dataclass, replace

import cutlass.cute as cute

from flash4.problem import AttentionProblem
from flash4.sim.chips import B200, TensorMemoryChip
from flash4.sim.sm100_fwd_clock import Call, Shape, costs_of, shape_of, tflops
from flash4.sm100.fwd_config import ForwardConfig, choose_config
from flash4.sm100.fwd_roles import ForwardRoles


class PublishedRoles(ForwardRoles):
    """Roles with the ends of the Blackwell forward's graph."""

    @cute.jit
    def load(self, ops, tiles, q_producer, kv_producer):
        """Q0, the last K, Q1, the last V; then K and V of every block before."""
        tile = tiles.first()
        while tile.valid:
            q_slot = q_producer.acquire_and_advance()
            ops.load_q(tile, 0, q_slot)
            q_slot.commit()
            kv_slot = kv_producer.acquire_and_advance()
            ops.load_k(tile, tile.n_blocks - 1, kv_slot)
            kv_slot.commit()
            q_slot = q_producer.acquire_and_advance()
            ops.load_q(tile, 1, q_slot)
            q_slot.commit()
            kv_slot = kv_producer.acquire_and_advance()
            ops.load_v(tile, tile.n_blocks - 1, kv_slot)
            kv_slot.commit()
            for i in range(1, tile.n_blocks):
                kv_slot = kv_producer.acquire_and_advance()
                ops.load_k(tile, tile.n_blocks - 1 - i, kv_slot)
                kv_slot.commit()
                kv_slot = kv_producer.acquire_and_advance()
                ops.load_v(tile, tile.n_blocks - 1 - i, kv_slot)
                kv_slot.commit()
            tile = tiles.next(tile)
        q_producer.tail()
        kv_producer.tail()

    @cute.jit
    def mma(self, ops, tiles, ends):
        """S0, S1; then by turns O0 += P0 V, the next S0, O1 += P1 V, the next S1."""
        q_consumer, kv_consumer = ends.q, ends.kv
        s0_signal, s1_signal, o0_signal, o1_signal = ends.s0, ends.s1, ends.o0, ends.o1
        p0_signal, p1_signal, t0_signal, t1_signal = ends.p0, ends.p1, ends.t0, ends.t1
        tile = tiles.first()
        while tile.valid:
            q0_slot = q_consumer.wait_and_advance()
            k_slot = kv_consumer.wait_and_advance()
            ops.qk(0, q0_slot, k_slot)
            s0_signal.post()
            q1_slot = q_consumer.wait_and_advance()
            ops.qk(1, q1_slot, k_slot)
            s1_signal.post()
            k_slot.release()
            for i in range(1, tile.n_blocks):
                v_slot = kv_consumer.wait_and_advance()
                p0_signal.wait()
                ops.pv_head(0, v_slot, i > 1)
                t0_signal.wait()
                ops.pv_tail(0, v_slot)
                k_slot = kv_consumer.wait_and_advance()
                ops.qk(0, q0_slot, k_slot)
                s0_signal.post()
                p1_signal.wait()
                ops.pv_head(1, v_slot, i > 1)
                t1_signal.wait()
                ops.pv_tail(1, v_slot)
                v_slot.release()
                ops.qk(1, q1_slot, k_slot)
                s1_signal.post()
                k_slot.release()
            q0_slot.release()
            q1_slot.release()
            v_slot = kv_consumer.wait_and_advance()
            p0_signal.wait()
            ops.pv_head(0, v_slot, tile.n_blocks > 1)
            t0_signal.wait()
            ops.pv_tail(0, v_slot)
            o0_signal.post()
            p1_signal.wait()
            ops.pv_head(1, v_slot, tile.n_blocks > 1)
            t1_signal.wait()
            ops.pv_tail(1, v_slot)
            o1_signal.post()
            v_slot.release()
            tile = tiles.next(tile)


@dataclass(frozen=True)
class Published:
    """A kernel of the published schedule.

    Attributes:
        config: tiles, slots and mask.
        emulated: of 128 exponentials, those that the FMA units compute, by a cubic.
        persistent: a CTA takes several tiles.
    """

    config: ForwardConfig
    emulated: int
    persistent: bool


def published(tile_d: int, tile_dv: int, causal: bool) -> Published:
    """The kernel that flash-attn-4 takes for head dims, without GQA."""
    pair = not causal and tile_dv == 128 and tile_d in (128, 192)
    emulated = {(128, False): 24, (128, True): 16, (192, False): 24, (192, True): 8}
    stages = {64: 6, 128: 6 if pair else 3, 192: 4 if pair else 3}[
        tile_d
    ]  # of unequal size where three do not fit
    config = ForwardConfig(
        bf16=True, tile_d=tile_d, tile_dv=tile_dv, causal=causal, ctas=2 if pair else 1, stages=stages,
        o_slots=1 if tile_d == 192 else 2,
    )  # fmt: skip
    return Published(config, emulated.get((tile_d, causal), 16), not causal)


# Speeds that were published for it on a B200, TFLOP/s: FA4's paper (d 128, and 192 with 128) and pull request 2605 (d 64).
SPEEDS = (
    (Call(8_192, 128, 128, False), 1_579),
    (Call(32_768, 128, 128, False), 1_613),
    (Call(8_192, 128, 128, True), 1_426),
    (Call(32_768, 128, 128, True), 1_576),
    (Call(8_192, 192, 128, True), 1_506),
    (Call(32_768, 192, 128, True), 1_654),
    (Call(8_192, 64, 64, False), 863),
    (Call(16_384, 64, 64, False), 879),
    (Call(8_192, 64, 64, True), 797),
    (Call(16_384, 64, 64, True), 852),
)
CUBIC = 3


def published_tflops(call: Call, chip: TensorMemoryChip) -> float:
    """Speed of the published schedule in the model."""
    kernel = published(call.head_dim, call.head_dim_v, call.causal)
    shape = Shape(kernel.config, PublishedRoles, kernel.emulated, CUBIC, clamped=True)
    return tflops(call, shape, costs_of(shape, chip), chip, kernel.persistent)


def our_tflops(call: Call, chip: TensorMemoryChip, **changes) -> float:
    """Speed of our own kernel in the model, with the config that the call gets, changed."""
    import torch

    sizes = (call.heads, call.seqlen, call.seqlen, 1, 1, call.head_dim, call.head_dim_v)
    config = choose_config(AttentionProblem(torch.bfloat16, *sizes, call.causal))[0]
    shape = shape_of(replace(config, **changes))
    return tflops(call, shape, costs_of(shape, chip), chip)


def main():
    """Print published speeds, what the model makes of that schedule, and what of ours."""
    print("seqlen  head dims  mask    published  model         ours")
    for call, speed in SPEEDS:
        theirs, ours = published_tflops(call, B200), our_tflops(call, B200)
        print(
            f"{call.seqlen:6}  {call.head_dim:4}/{call.head_dim_v:<4}  {'causal' if call.causal else 'full':6}"
            f"  {speed:9}  {theirs:5.0f} {theirs / speed - 1:+6.1%}  {ours:5.0f} {ours / theirs:6.3f}"
        )


if __name__ == "__main__":
    main()
