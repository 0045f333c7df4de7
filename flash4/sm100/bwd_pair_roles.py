"""Schedule of the Blackwell backward for a pair of CTAs, as far as it is not that of one; see ``bwd_roles``.

Each CTA has 128 of the tile's 256 keys: their S^T, P^T, dP^T, dS^T, dV and dK. For dQ each has 64 of a step's queries, and
needs the peer's dS of them: ``relay`` sends it. Loads go in two rings by when they are used and when their memory is free:
a is dO^T(i) and Q(i+1), b is Q^T(i) and dO(i+1). Neither has an empty side: ``load`` waits for the tensor core's own events.

More ends of step i: ``early`` S is in registers, ``dst`` dS^T is in tensor memory, ``ds`` dS is in shared memory and may be
sent, ``x`` the peer's has come, ``y`` it has come in both CTAs.
"""

import cutlass.cute as cute


class PairRoles:
    """Roles ``load`` and ``relay`` (a warp in each CTA) and ``mma`` (a warp of the leader)."""

    @cute.jit
    def load(self, ops, tiles, ends):
        """K, V and K^T once per tile; the rest once per step, as soon as what it overwrites is dead."""
        k_producer, v_producer, kt_producer = ends.k, ends.v, ends.kt
        a_producer, b_producer, stat_producer = ends.a, ends.b, ends.stat
        s_signal, dp_signal = ends.s, ends.dp
        tile = tiles.first()
        while tile.valid:
            k_slot = k_producer.acquire_and_advance(ops.k_bytes)
            ops.load_k(tile, k_slot)
            a_slot = a_producer.acquire_and_advance(ops.q_bytes)
            ops.load_q(tile, 0, a_slot)
            stat_slot = stat_producer.acquire_and_advance(ops.stat_bytes)
            ops.load_stat(tile, 0, stat_slot)
            v_slot = v_producer.acquire_and_advance(ops.v_bytes)
            ops.load_v(tile, v_slot)
            b_slot = b_producer.acquire_and_advance(ops.do_bytes)
            ops.load_do(tile, 0, b_slot)
            kt_slot = kt_producer.acquire_and_advance(ops.k_bytes)
            ops.load_kt(tile, kt_slot)
            for i in range(1, tile.steps):
                s_signal.wait()  # S(i-1) is done: Q is free, and dO^T, for dV(i-2) came before
                a_slot = a_producer.acquire_and_advance(ops.do_bytes + ops.q_bytes)
                ops.load_dot(tile, i - 1, a_slot)
                ops.load_q(tile, i, a_slot)
                dp_signal.wait()  # dP(i-1) is done: dO is free, and Q^T, for dK(i-2) came before
                b_slot = b_producer.acquire_and_advance(ops.q_bytes + ops.do_bytes)
                ops.load_qt(tile, i - 1, b_slot)
                ops.load_do(tile, i, b_slot)
                stat_slot = stat_producer.acquire_and_advance(ops.stat_bytes)
                ops.load_stat(tile, i, stat_slot)
            s_signal.wait()
            a_slot = a_producer.acquire_and_advance(ops.do_bytes)
            ops.load_dot(tile, tile.steps - 1, a_slot)
            dp_signal.wait()
            b_slot = b_producer.acquire_and_advance(ops.q_bytes)
            ops.load_qt(tile, tile.steps - 1, b_slot)
            tile = tiles.next(tile)

    @cute.jit
    def mma(self, ops, tiles, ends):
        """All MMAs of both CTAs, by the leader."""
        k_consumer, v_consumer, kt_consumer = ends.k, ends.v, ends.kt
        a_consumer, b_consumer = ends.a, ends.b
        s_signal, early_signal, p_signal, dp_signal = ends.s, ends.early, ends.p, ends.dp
        dst_signal, y_signal, dq_signal, r_signal = ends.dst, ends.y, ends.dq, ends.r
        dv_signal, dk_signal = ends.dv, ends.dk
        tile = tiles.first()
        while tile.valid:
            k_consumer.wait_and_advance()
            a_slot = a_consumer.wait_and_advance()  # Q(0)
            r_signal.wait()  # the last tile's dQ is out of S
            ops.s(a_slot)  # S^T(0) = K Q(0)^T
            s_signal.post()
            v_consumer.wait_and_advance()
            b_slot = b_consumer.wait_and_advance()  # dO(0)
            ops.dp(b_slot)  # dP^T(0) = V dO(0)^T
            dp_signal.post()
            kt_consumer.wait_and_advance()
            early_signal.wait()
            p_signal.wait()
            a_slot = a_consumer.wait_and_advance()  # dO^T(0), Q(1)
            ops.dv(a_slot, False)  # dV = P^T(0) dO(0)
            for i in range(1, tile.steps):
                ops.s(a_slot)  # over P(i-1), dead behind dV(i-1)
                s_signal.post()
                dst_signal.wait()
                b_slot = b_consumer.wait_and_advance()  # Q^T(i-1), dO(i)
                ops.dk(b_slot, i > 1)  # dK += dS^T(i-1) Q(i-1)
                ops.dp(b_slot)  # over dS^T(i-1)
                dp_signal.post()
                early_signal.wait()  # S(i) is in registers, its second half free
                y_slot = y_signal.wait()  # both halves of dS(i-1) have come
                ops.dq(y_slot)  # dQ(i-1) = dS(i-1) K: 64 queries in each CTA, all 256 keys
                dq_signal.post()
                p_signal.wait()
                a_slot = a_consumer.wait_and_advance()  # dO^T(i), Q(i+1)
                ops.dv(a_slot, True)
                r_signal.wait()  # dQ(i-1) is out of S
            dv_signal.post()
            dst_signal.wait()
            b_slot = b_consumer.wait_and_advance()  # Q^T of the last step
            ops.dk(b_slot, tile.steps > 1)
            y_slot = y_signal.wait()
            ops.dq(y_slot)
            dq_signal.post()
            dk_signal.post()  # and nobody reads K and K^T any more
            tile = tiles.next(tile)

    @cute.jit
    def relay(self, ops, tiles, ends):
        """Sends dS of the peer's queries, and tells the leader when that of this CTA's has come."""
        ds_signal, x_signal, y_signal = ends.ds, ends.x, ends.y
        tile = tiles.first()
        while tile.valid:
            for _ in range(0, tile.steps):
                ds_signal.wait()
                x_signal.expect(ops.panel_bytes)
                ops.send_ds()  # its bytes complete the peer's x
                x_signal.wait()
                y_signal.post()
            tile = tiles.next(tile)
