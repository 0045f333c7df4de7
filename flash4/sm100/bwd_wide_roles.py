"""Schedule of the Blackwell backward where V is kept in tensor memory, as far as it is not that of ``bwd_roles``.

V of a tile comes by halves of its columns through one buffer; ``compute`` takes them to tensor memory, and dV leaves through the
buffer. More ends of a tile: ``vt`` V is in tensor memory, which ``mma`` waits for as if V were a slot of a ring.
"""

import cutlass.cute as cute

from flash4.sm100.bwd_roles import BackwardRoles


class KeptRoles(BackwardRoles):
    """Roles ``load`` (a warp) and ``compute`` (two warpgroups); ``mma`` and ``reduce`` are those of one CTA."""

    @cute.jit
    def load(self, ops, tiles, ends):
        """K and the halves of V once per tile; Q, its statistics and dO once per step."""
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
            ops.load_half_v(tile, 0, v_slot)
            do_slot = do_producer.acquire_and_advance(ops.do_bytes)
            ops.load_do(tile, 0, do_slot)
            v_slot = v_producer.acquire_and_advance(ops.v_bytes)  # compute has read the first half
            ops.load_half_v(tile, 1, v_slot)
            for i in range(1, tile.steps):
                q_slot = q_producer.acquire_and_advance(ops.q_bytes)
                ops.load_q(tile, i, q_slot)
                stat_slot = stat_producer.acquire_and_advance(ops.stat_bytes)  # freed with Q
                ops.load_stat(tile, i, stat_slot)
                do_slot = do_producer.acquire_and_advance(ops.do_bytes)
                ops.load_do(tile, i, do_slot)
            tile = tiles.next(tile)

    @cute.jit
    def compute(self, ops, tiles, ends):
        """V to tensor memory; then as in ``bwd_roles``, of one CTA."""
        v_consumer, stat_consumer, compute_meeting = ends.v, ends.stat, ends.meeting
        s_signal, p_signal, dp_signal, ds_signal = ends.s, ends.p, ends.dp, ends.ds
        vt_signal, dv_signal, dk_signal = ends.vt, ends.dv, ends.dk
        v_free_signal, k_free_signal = ends.v_free, ends.k_free
        tile = tiles.first()
        while tile.valid:
            v_consumer.wait_and_advance()
            ops.keep_v(0)  # the last tile's dK came after its last dP
            v_free_signal.post()
            v_consumer.wait_and_advance()
            ops.keep_v(1)
            vt_signal.post()
            for phase in ops.phases(tile):  # masked steps, and others: unrolled
                for i in range(phase.begin, phase.end):
                    place = ops.place(tile, i, phase)
                    stat_slot = stat_consumer.wait_and_advance()
                    s_signal.wait()
                    scores = ops.load_s()
                    weights, probs = ops.softmax(tile, place, scores, stat_slot, phase)
                    ops.store_p(probs)  # P^T = exp(scale S^T - LSE)
                    p_signal.post()
                    dp_signal.wait()
                    grads = ops.grad(weights, stat_slot)  # dS^T = P^T (dP^T - D)
                    ops.store_ds(grads)
                    ds_signal.post()
            dv_signal.wait()
            ops.stage_dv()
            compute_meeting.sync()
            ops.send_dv(tile)
            dk_signal.wait()
            ops.stage_dk()
            compute_meeting.sync()
            ops.send_dk(tile)
            ops.wait_sent()  # dV and dK have left V's and K's memory
            v_free_signal.post()
            k_free_signal.post()
            tile = tiles.next(tile)
        ops.drain()
