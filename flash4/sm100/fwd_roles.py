"""Schedule of the Blackwell forward: one function per warp role, each with its whole persistent loop.

The same source is compiled for the GPU and run in plain Python by ``flash4.sim``: a role sees only its ends, the tile
schedule and the verbs of ``ops``. See ``docs/dsl-rules.md`` for what may stand here.

Ends of tile i: ``s`` S is there, ``p`` P is there but for its last columns and O is rescaled, ``t`` the last columns of
P are there, ``o`` the tile's last P V is done, ``m`` the factor of O is there, ``l`` the inverse row sum is there, ``f`` it was read.
"""

import cutlass.cute as cute


class ForwardRoles:
    """Roles ``load``, ``mma`` and ``store`` (a warp each), ``softmax`` (two warpgroups) and ``correction`` (one)."""

    @cute.jit
    def load(self, ops, tiles, q_producer, kv_producer):
        """Both Q tiles once per tile; K and V of every block, from the last to the first.

        V of a block comes before K of the next: with three slots, K is loaded into the one that V(i+1) has left.
        """
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
            for i in range(1, tile.n_blocks):
                n_block = tile.n_blocks - 1 - i
                kv_slot = kv_producer.acquire_and_advance()
                ops.load_v(tile, n_block + 1, kv_slot)
                kv_slot.commit()
                kv_slot = kv_producer.acquire_and_advance()
                ops.load_k(tile, n_block, kv_slot)
                kv_slot.commit()
            kv_slot = kv_producer.acquire_and_advance()
            ops.load_v(tile, 0, kv_slot)
            kv_slot.commit()
            tile = tiles.next(tile)
        q_producer.tail()
        kv_producer.tail()

    @cute.jit
    def mma(self, ops, tiles, ends):
        """S(i) follows P(i+1) V of the same tile; while one tile's softmax runs, the other's products do."""
        q_consumer, kv_consumer = ends.q, ends.kv
        s0_signal, s1_signal, o0_signal, o1_signal = ends.s0, ends.s1, ends.o0, ends.o1
        p0_signal, p1_signal, t0_signal, t1_signal = ends.p0, ends.p1, ends.t0, ends.t1
        tile = tiles.first()
        while tile.valid:
            q0_slot = q_consumer.wait_and_advance()
            k_slot = kv_consumer.wait_and_advance()
            ops.qk(0, q0_slot, k_slot)  # S0 = Q0 K^T, last block
            s0_signal.post()
            q1_slot = q_consumer.wait_and_advance()
            ops.qk(1, q1_slot, k_slot)  # S1 = Q1 K^T
            s1_signal.post()
            k_slot.release()
            for i in range(1, tile.n_blocks):
                v_slot = kv_consumer.wait_and_advance()
                p0_signal.wait()
                ops.pv_head(0, v_slot, i > 1)  # O0 (+)= P0(i+1) V, first columns of P
                t0_signal.wait()
                ops.pv_tail(0, v_slot)
                k_slot = kv_consumer.wait_and_advance()
                ops.qk(0, q0_slot, k_slot)  # S0(i), over P0: MMAs of one issuer run in order
                s0_signal.post()  # O0 is done as well
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

    @cute.jit
    def softmax(self, ops, tiles, ends):
        """One Q tile, one row a thread: P = exp(S - shift) over S, and row sums."""
        s_signal, p_signal, t_signal = ends.s, ends.p, ends.t
        m_signal, l_signal, f_signal = ends.m, ends.l, ends.f
        tile = tiles.first()
        while tile.valid:
            row_shift, row_sum = ops.begin(tile)
            for phase in ops.phases(tile):  # masked blocks, and others: unrolled
                for i in range(phase.begin, phase.end):
                    s_signal.wait()
                    scores = ops.load_s(tile, tile.n_blocks - 1 - i, phase)  # S to registers
                    row_shift, factor = ops.move_shift(scores, row_shift, phase)
                    ops.put_factor(factor)
                    m_signal.post()
                    ops.exp_head(scores, row_shift, phase)
                    p_signal.post()
                    ops.exp_tail(scores, row_shift, phase)
                    t_signal.post()
                    row_sum = ops.add_sum(scores, row_sum, factor)
            f_signal.wait()  # the last tile's has been read
            ops.put_inverse(tile, row_shift, row_sum)
            l_signal.post()
            ops.store_lse(tile, row_shift, row_sum)
            tile = tiles.next(tile)

    @cute.jit
    def correction(self, ops, tiles, ends):
        """O follows a moved shift; at the end O over the row sum goes to shared memory."""
        o_producer = ends.o
        m0_signal, m1_signal, o0_signal, o1_signal = ends.m0, ends.m1, ends.o0, ends.o1
        p0_signal, p1_signal, l0_signal, l1_signal = ends.p0, ends.p1, ends.l0, ends.l1
        f0_signal, f1_signal = ends.f0, ends.f1
        tile = tiles.first()
        while tile.valid:
            m0_signal.wait()
            p0_signal.post()  # the first P V overwrites O: nothing to rescale
            m1_signal.wait()
            p1_signal.post()
            for _ in range(1, tile.n_blocks):
                m0_signal.wait()
                factor = ops.get_factor(0)  # came of S(i), behind which P(i+1) V is done
                ops.rescale_o(0, factor)
                p0_signal.post()
                m1_signal.wait()
                factor = ops.get_factor(1)
                ops.rescale_o(1, factor)
                p1_signal.post()
            l0_signal.wait()
            inverse = ops.get_inverse(0)
            f0_signal.post()
            o_slot = o_producer.acquire_and_advance()
            o0_signal.wait()
            ops.finish_o(tile, 0, o_slot, inverse)
            o_slot.commit()
            l1_signal.wait()
            inverse = ops.get_inverse(1)
            f1_signal.post()
            o_slot = o_producer.acquire_and_advance()
            o1_signal.wait()
            ops.finish_o(tile, 1, o_slot, inverse)
            o_slot.commit()
            tile = tiles.next(tile)

    @cute.jit
    def store(self, ops, tiles, o_consumer):
        """O of both tiles from shared to global memory."""
        tile = tiles.first()
        while tile.valid:
            for q_tile in (0, 1):
                o_slot = o_consumer.wait_and_advance()
                ops.store_o(tile, q_tile, o_slot)
                ops.wait_store()  # it has read its slot
                o_slot.release()
            tile = tiles.next(tile)

    @cute.jit
    def idle(self, tiles):
        """Warps of a pair that have no work: a cluster's barrier, where all meet between passes, counts them."""
        tiles.meet()
