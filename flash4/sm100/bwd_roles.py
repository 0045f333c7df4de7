"""Schedule of the Blackwell backward: one function per warp role, each with its whole persistent loop; see ``fwd_roles``.

A tile is a block of keys, which stays; blocks of queries come by, of every query head that shares the KV head. A step is
one of them. Rows of S^T and dP^T are keys.

Ends of step i: ``s`` S is there, ``p`` P is, ``dp`` dP is, ``ds`` dS is in shared memory, ``dq`` dQ is there, ``r`` it was
read; of a tile: ``dv`` and ``dk`` are whole. Ends of pairs alone do nothing here; see ``bwd_pair_roles``.
"""

import cutlass.cute as cute


class BackwardRoles:
    """Roles ``load`` and ``mma`` (a warp each) of one CTA; ``compute`` (two warpgroups) and ``reduce`` (one) of a pair too."""

    @cute.jit
    def load(self, ops, tiles, ends):
        """K and V once per tile; Q, its statistics and dO once per step."""
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
                q_slot = q_producer.acquire_and_advance(ops.q_bytes)
                ops.load_q(tile, i, q_slot)
                stat_slot = stat_producer.acquire_and_advance(ops.stat_bytes)  # freed with Q
                ops.load_stat(tile, i, stat_slot)
                do_slot = do_producer.acquire_and_advance(ops.do_bytes)
                ops.load_do(tile, i, do_slot)
            tile = tiles.next(tile)

    @cute.jit
    def mma(self, ops, tiles, ends):
        """dQ comes before dK, which reads the same dS from shared memory: dQ's way out hides behind dK."""
        k_consumer, v_consumer, q_consumer, qt_consumer = ends.k, ends.v, ends.q, ends.qt
        do_consumer, dot_consumer = ends.do, ends.dot
        s_signal, p_signal, dp_signal, ds_signal = ends.s, ends.p, ends.dp, ends.ds
        dq_signal, r_signal, dv_signal, dk_signal = ends.dq, ends.r, ends.dv, ends.dk
        tile = tiles.first()
        while tile.valid:
            k_consumer.wait_and_advance()
            q_slot = q_consumer.wait_and_advance()
            ops.s(q_slot)  # S^T(0) = K Q(0)^T
            s_signal.post()
            v_consumer.wait_and_advance()
            do_slot = do_consumer.wait_and_advance()
            r_signal.wait()  # the last tile's dQ is out of tensor memory
            ops.dp(do_slot)  # dP^T(0) = V dO(0)^T
            dp_signal.post()
            p_signal.wait()
            dot_slot = dot_consumer.advance()  # the same slot
            ops.dv(dot_slot, False)  # dV = P^T(0) dO(0)
            dot_slot.release()
            for i in range(1, tile.steps):
                q_slot = q_consumer.wait_and_advance()
                ops.s(q_slot)  # over P(i-1): MMAs of one issuer run in order
                s_signal.post()
                ds_slot = ds_signal.wait()
                ops.dq(ds_slot)  # dQ(i-1) = dS(i-1) K, over dP(i-1)
                dq_signal.post()
                qt_slot = qt_consumer.advance()
                ops.dk(qt_slot, i > 1)  # dK += dS^T(i-1) Q(i-1)
                qt_slot.release()
                do_slot = do_consumer.wait_and_advance()
                r_signal.wait()  # dQ(i-1) is out
                ops.dp(do_slot)
                dp_signal.post()
                p_signal.wait()
                dot_slot = dot_consumer.advance()
                ops.dv(dot_slot, True)
                dot_slot.release()
            dv_signal.post()
            ds_slot = ds_signal.wait()
            ops.dq(ds_slot)
            dq_signal.post()
            qt_slot = qt_consumer.advance()
            ops.dk(qt_slot, tile.steps > 1)
            qt_slot.release()
            dk_signal.post()  # and nobody reads K any more
            tile = tiles.next(tile)

    @cute.jit
    def compute(self, ops, tiles, ends):
        """P and dS of a warp's 32 keys and half of the queries; at the end of a tile dV and dK through V's and K's memory."""
        stat_consumer, compute_meeting = ends.stat, ends.meeting
        s_signal, early_signal, p_signal, dp_signal = ends.s, ends.early, ends.p, ends.dp
        dst_signal, free_signal, ds_signal = ends.dst, ends.free, ends.ds
        dv_signal, dk_signal, k_free_signal = ends.dv, ends.dk, ends.k_free
        tile = tiles.first()
        while tile.valid:
            for phase in ops.phases(tile):  # masked steps, and others: unrolled
                for i in range(phase.begin, phase.end):
                    place = ops.place(tile, i, phase)
                    stat_slot = stat_consumer.wait_and_advance()
                    s_signal.wait()
                    scores = ops.load_s()
                    early_signal.post()  # pair: dQ(i-1) may take the second half of S
                    weights, probs = ops.softmax(tile, place, scores, stat_slot, phase)
                    ops.store_p(probs)  # P^T = exp(scale S^T - LSE)
                    p_signal.post()
                    dp_signal.wait()
                    grads = ops.grad(weights, stat_slot)  # dS^T = P^T (dP^T - D)
                    ops.store_dst(grads)  # pair: A of dK
                    dst_signal.post()
                    free_signal.wait()  # pair: dQ(i-1) has read dS; else dP(i) says so
                    ops.store_ds(grads)  # A of dQ
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
            k_free_signal.post()
            tile = tiles.next(tile)
        ops.drain()

    @cute.jit
    def reduce(self, ops, tiles, ends):
        """Adds dQ of each step to the sums in global memory, by turns if their order is fixed."""
        dq_signal, r_signal, reduce_meeting = ends.dq, ends.r, ends.meeting
        tile = tiles.first()
        while tile.valid:
            for i in range(0, tile.steps):
                place = ops.place(tile, i)
                dq_signal.wait()
                sums = ops.load_dq()
                r_signal.post()
                ops.wait_turn(tile, place)  # the tiles before have added theirs
                for part in ops.parts:
                    ops.stage_dq(sums, part)
                    ops.wait_read()  # so that the next part's place is free
                    reduce_meeting.sync()
                    ops.add_dq(place, part)
                ops.pass_turn(tile, place)  # what was added is written
            tile = tiles.next(tile)
        ops.drain()
