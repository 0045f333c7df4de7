"""Schedule of the wide Hopper backward whose two CTAs add dQ up together; see ``bwd_wide_roles``.

Each CTA has dS of its own keys, gets that of the other's, and multiplies half of the head dims of dQ over the keys of both:
half as many additions.
"""

import cutlass.cute as cute

from flash4.sm90.bwd_wide_roles import WideBackwardRoles


class JointBackwardRoles(WideBackwardRoles):
    """Roles ``mma_v`` and ``mma_k``; the others are those of the wide kernel. A part of dQ goes out in two halves."""

    @cute.jit
    def mma_v(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """S^T, P, dV and a part of dQ."""
        count = 0  # steps
        tile = tiles.first()
        while tile.valid:
            ops.begin()  # dV = 0
            k_slot = k_consumer.wait_and_advance()
            v_slot = v_consumer.wait_and_advance()  # its memory: dV leaves through it
            for phase in ops.phases(tile):  # masked steps, then the others: unrolled
                for i in range(phase.begin, phase.end):
                    q_slot = q_consumer.wait_and_advance()
                    s = ops.s(k_slot, q_slot)  # S^T = K Q^T
                    if i > 0:
                        outbox.acquire()
                        ops.put_second_half()  # of the last dQ
                        outbox.commit()
                    ops.wait_mma(0)  # S is there
                    ops.softmax(tile, i, s, q_slot, phase)  # P = exp(scale S - LSE)
                    q_slot.release()
                    ops.put_p(s)  # ``mma_k`` has read the last one: its dS came after that
                    exchange.post_p()
                    do_slot = do_consumer.wait_and_advance()
                    ops.dv(do_slot)  # dV += P^T dO
                    exchange.wait_ds()
                    ops.dq(i, k_slot)  # dQ = dS K, over this CTA's keys
                    exchange.wait_peer(count)
                    ops.dq_of_peer(k_slot)  # and over the other's
                    ops.wait_mma(2)  # dV is there
                    do_slot.release()
                    ops.wait_mma(0)  # dQ is there
                    exchange.release_peer()
                    outbox.acquire()
                    ops.put_first_half()  # for ``reduce``
                    outbox.commit()
                    count = count + 1
            outbox.acquire()
            ops.put_second_half()
            outbox.commit()
            exchange.sync()  # nobody reads K and V any more
            ops.store_dv(tile)
            ops.wait_store()
            v_slot.release()
            k_slot.release()
            tile = tiles.next(tile)

    @cute.jit
    def mma_k(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """dP^T, dS, dK and another part of dQ."""
        count = 0  # steps
        tile = tiles.first()
        while tile.valid:
            ops.begin()  # dK = 0
            k_slot = k_consumer.wait_and_advance()
            v_slot = v_consumer.wait_and_advance()
            for i in range(0, tile.steps):
                do_slot = do_consumer.wait_and_advance()
                dp = ops.dp(v_slot, do_slot)  # dP^T = V dO^T
                q_slot = q_consumer.wait_and_advance()
                exchange.wait_p()
                scores = ops.take_p(tile, i, q_slot)
                ops.wait_mma(0)  # dP is there
                exchange.acquire_ds(count)  # the other CTA has read the last one
                ops.ds(i, scores, dp, do_slot)  # dS = P (dP - D), to registers and shared memory
                do_slot.release()
                exchange.post_ds()
                exchange.send_ds()  # to the other CTA
                ops.dq(i, k_slot)  # dQ = dS K, over this CTA's keys
                ops.dk(q_slot)  # dK += dS^T Q
                exchange.wait_peer(count)
                ops.dq_of_peer(k_slot)  # and over the other's
                ops.wait_mma(1)  # dK is there; Q is free
                q_slot.release()
                ops.wait_mma(0)  # dQ is there
                exchange.release_peer()
                outbox.acquire()
                ops.put_first_half()  # for ``reduce``
                outbox.commit()
                outbox.acquire()
                ops.put_second_half()
                outbox.commit()
                count = count + 1
            exchange.sync()  # nobody reads K and V any more
            ops.store_dk(tile)
            ops.wait_store()
            v_slot.release()
            k_slot.release()
            tile = tiles.next(tile)
