"""The backward schedules that FlashAttention-4 has published for Blackwell, in our own words, to judge the clock with.

What is public of them: 128 keys a CTA and blocks of 128 queries; P and dS in tensor memory over S and dP. One CTA: dK, then
dQ over dP, so that the next dP waits for dQ's way out. A pair: dQ over S, once the next P is there. Every step masks what is behind the last
key, compute has five barriers of 256 threads, a CTA takes one tile, and tiles come head by head. Loads, compute and reduce are those of our own roles.

``python -m flash4.sim.sm100_bwd_published`` prints published speeds, what the model makes of them, and of our own kernel.
"""

import cutlass.cute as cute

from flash4.sim.chips import B200, TensorMemoryChip
from flash4.sim.sm100_bwd_clock import Shape, costs_of, tflops
from flash4.sim.sm100_bwd_turns import config_of, speed
from flash4.sm100.bwd_pair_roles import PairRoles
from flash4.sm100.bwd_roles import BackwardRoles

MASKS, MEETINGS = 2, 5  # a query and a step, by the machine code


class PublishedRoles(BackwardRoles):
    """One CTA."""

    @cute.jit
    def mma(self, ops, tiles, ends):
        """dK before dQ."""
        k_consumer, v_consumer, q_consumer, qt_consumer = ends.k, ends.v, ends.q, ends.qt
        do_consumer, dot_consumer = ends.do, ends.dot
        s_signal, p_signal, dp_signal, ds_signal = ends.s, ends.p, ends.dp, ends.ds
        dq_signal, r_signal, dv_signal, dk_signal = ends.dq, ends.r, ends.dv, ends.dk
        tile = tiles.first()
        while tile.valid:
            k_consumer.wait_and_advance()
            q_slot = q_consumer.wait_and_advance()
            ops.s(q_slot)
            s_signal.post()
            v_consumer.wait_and_advance()
            do_slot = do_consumer.wait_and_advance()
            r_signal.wait()
            ops.dp(do_slot)
            dp_signal.post()
            p_signal.wait()
            dot_slot = dot_consumer.advance()
            ops.dv(dot_slot, False)
            dot_slot.release()
            for i in range(1, tile.steps):
                q_slot = q_consumer.wait_and_advance()
                ops.s(q_slot)
                s_signal.post()
                ds_slot = ds_signal.wait()
                qt_slot = qt_consumer.advance()
                ops.dk(qt_slot, i > 1)
                qt_slot.release()
                ops.dq(ds_slot)
                dq_signal.post()
                do_slot = do_consumer.wait_and_advance()
                r_signal.wait()
                ops.dp(do_slot)
                dp_signal.post()
                p_signal.wait()
                dot_slot = dot_consumer.advance()
                ops.dv(dot_slot, True)
                dot_slot.release()
            dv_signal.post()
            ds_slot = ds_signal.wait()
            qt_slot = qt_consumer.advance()
            ops.dk(qt_slot, tile.steps > 1)
            qt_slot.release()
            ops.dq(ds_slot)
            dq_signal.post()
            dk_signal.post()
            tile = tiles.next(tile)


class PublishedPairRoles(PairRoles):
    """A pair."""

    @cute.jit
    def mma(self, ops, tiles, ends):
        """dQ behind the next P."""
        k_consumer, v_consumer, kt_consumer = ends.k, ends.v, ends.kt
        a_consumer, b_consumer = ends.a, ends.b
        s_signal, early_signal, p_signal, dp_signal = ends.s, ends.early, ends.p, ends.dp
        dst_signal, y_signal, dq_signal, r_signal = ends.dst, ends.y, ends.dq, ends.r
        dv_signal, dk_signal = ends.dv, ends.dk
        tile = tiles.first()
        while tile.valid:
            k_consumer.wait_and_advance()
            a_slot = a_consumer.wait_and_advance()
            r_signal.wait()
            ops.s(a_slot)
            s_signal.post()
            v_consumer.wait_and_advance()
            b_slot = b_consumer.wait_and_advance()
            ops.dp(b_slot)
            dp_signal.post()
            kt_consumer.wait_and_advance()
            early_signal.wait()
            p_signal.wait()
            a_slot = a_consumer.wait_and_advance()
            ops.dv(a_slot, False)
            for i in range(1, tile.steps):
                ops.s(a_slot)
                s_signal.post()
                dst_signal.wait()
                b_slot = b_consumer.wait_and_advance()
                ops.dk(b_slot, i > 1)
                ops.dp(b_slot)
                dp_signal.post()
                early_signal.wait()
                p_signal.wait()
                y_slot = y_signal.wait()
                ops.dq(y_slot)
                dq_signal.post()
                a_slot = a_consumer.wait_and_advance()
                ops.dv(a_slot, True)
                r_signal.wait()
            dv_signal.post()
            dst_signal.wait()
            b_slot = b_consumer.wait_and_advance()
            ops.dk(b_slot, tile.steps > 1)
            y_slot = y_signal.wait()
            ops.dq(y_slot)
            dq_signal.post()
            dk_signal.post()
            tile = tiles.next(tile)


# (CTAs, causal): TFLOP/s on a B200, head dim 128, 8k; pull request 2280.
SPEEDS = {(2, False): 1_360, (2, True): 1_209, (1, False): 1_248, (1, True): 1_118}
SEQLENS = (8_192, 32_768)


def shape_of(ctas: int, causal: bool) -> Shape:
    """The published kernel."""
    roles = (PublishedRoles, PublishedPairRoles)
    return Shape(config_of(ctas, causal), *roles, MASKS, MEETINGS, keeps_dst=True, persistent=False)


def model(seqlen, call, published: bool, chip: TensorMemoryChip) -> float:
    """TFLOP/s of a schedule in the model."""
    if not published:
        return speed(config_of(*call), seqlen, chip)
    shape = shape_of(*call)
    return tflops(seqlen, call[1], shape, costs_of(shape, chip), chip)


def main():
    """Print."""
    print("seqlen  CTAs mask    published  model         ours  over the model's")
    for seqlen in SEQLENS:
        for call, published in SPEEDS.items():
            theirs, ours = (model(seqlen, call, which, B200) for which in (True, False))
            known = f"{published:9} " if seqlen == SEQLENS[0] else " " * 10
            error = f"{theirs / published - 1:+6.1%}" if seqlen == SEQLENS[0] else " " * 6
            print(
                f"{seqlen:6}  {call[0]:4} {'causal' if call[1] else 'full':6}  {known}"
                f" {theirs:5.0f} {error}  {ours:5.0f} {ours / theirs:6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
