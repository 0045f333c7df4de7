"""Schedule of the Blackwell backward where Q has one slot, as far as it is not that of one CTA with two; see ``bwd_roles``.

S of a step cannot be multiplied before dK of the last one has read Q. So the products of a step stay together, and dK comes
before dQ, which has columns of its own: while dQ is multiplied the next Q comes.
"""

import cutlass.cute as cute

from flash4.sm100.bwd_roles import BackwardRoles


class OneSlotRoles(BackwardRoles):
    """Roles ``load`` and ``mma`` (a warp each); ``compute`` and ``reduce`` are those of two slots."""

    @cute.jit
    def load(self, ops, tiles, ends):
        """K and V once per tile; dO, which is free first, Q and its statistics once per step."""
        k_producer, v_producer, q_producer = ends.k, ends.v, ends.q
        do_producer, stat_producer = ends.do, ends.stat
        tile = tiles.first()
        while tile.valid:
            k_slot = k_producer.acquire_and_advance(ops.k_bytes)
            ops.load_k(tile, k_slot)
            q_slot = q_producer.acquire_and_advance(ops.q_bytes)
            ops.load_q(tile, 0, q_slot)
            stat_slot = stat_producer.acquire_and_advance(ops.stat_bytes)
            ops.load_stat(tile, 0, stat_slot)
            v_slot = v_producer.acquire_and_advance(ops.v_bytes)
            ops.load_v(tile, v_slot)
            do_slot = do_producer.acquire_and_advance(ops.do_bytes)
            ops.load_do(tile, 0, do_slot)
            for i in range(1, tile.steps):
                do_slot = do_producer.acquire_and_advance(ops.do_bytes)
                ops.load_do(tile, i, do_slot)
                q_slot = q_producer.acquire_and_advance(ops.q_bytes)
                ops.load_q(tile, i, q_slot)
                stat_slot = stat_producer.acquire_and_advance(ops.stat_bytes)  # freed with Q
                ops.load_stat(tile, i, stat_slot)
            tile = tiles.next(tile)

    @cute.jit
    def mma(self, ops, tiles, ends):
        """One step after the other; dP hides behind the exponentials, dQ the way in of the next Q."""
        k_consumer, v_consumer, q_consumer, do_consumer = ends.k, ends.v, ends.q, ends.do
        s_signal, p_signal, dp_signal, ds_signal = ends.s, ends.p, ends.dp, ends.ds
        dq_signal, r_signal, dv_signal, dk_signal = ends.dq, ends.r, ends.dv, ends.dk
        tile = tiles.first()
        while tile.valid:
            k_consumer.wait_and_advance()
            v_consumer.wait_and_advance()
            for i in range(0, tile.steps):
                q_slot = q_consumer.wait_and_advance()
                ops.s(q_slot)  # S^T = K Q^T, over P(i-1), dead behind dV(i-1)
                s_signal.post()
                do_slot = do_consumer.wait_and_advance()
                ops.dp(do_slot)  # dP^T = V dO^T: dS(i-1) came after dP(i-1) was read
                dp_signal.post()
                p_signal.wait()
                ops.dv(do_slot, i > 0)  # dV += P^T dO
                do_slot.release()
                ds_slot = ds_signal.wait()
                ops.dk(q_slot, i > 0)  # dK += dS^T Q
                q_slot.release()
                r_signal.wait()  # dQ(i-1) is out of tensor memory
                ops.dq(ds_slot)  # dQ = dS K
                dq_signal.post()
            dv_signal.post()
            dk_signal.post()  # and nobody reads K and V any more
            tile = tiles.next(tile)
