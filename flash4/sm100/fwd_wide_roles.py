"""Schedule of the Blackwell forward for wide heads: one Q tile, and two S, of blocks by turns.

Where two O do not fit tensor memory, there is no second tile whose products run beside a softmax. Then S(i) = Q K^T of
the next block is issued before P V of the one before: the tensor core has that, and the P V before it, meanwhile.

Ends as in ``fwd_roles``, but s, p, t and m are two signals each, of blocks by turns, which to the waiter are a
ring of two slots: who posts says which, who waits is told.
"""

import cutlass.cute as cute


class WideRoles:
    """Roles ``load``, ``mma`` and ``store`` (a warp each), ``softmax`` and ``correction`` (a warpgroup each)."""

    @cute.jit
    def load(self, ops, tiles, q_producer, kv_producer):
        """Q once per tile; K of every block, from the last to the first, before V of the one before."""
        tile = tiles.first()
        while tile.valid:
            q_slot = q_producer.acquire_and_advance()
            ops.load_q(tile, 0, q_slot)
            q_slot.commit()
            kv_slot = kv_producer.acquire_and_advance()
            ops.load_k(tile, tile.n_blocks - 1, kv_slot)
            kv_slot.commit()
            for i in range(1, tile.n_blocks):
                n_block = tile.n_blocks - 1 - i
                kv_slot = kv_producer.acquire_and_advance()
                ops.load_k(tile, n_block, kv_slot)
                kv_slot.commit()
                kv_slot = kv_producer.acquire_and_advance()
                ops.load_v(tile, n_block + 1, kv_slot)
                kv_slot.commit()
            kv_slot = kv_producer.acquire_and_advance()
            ops.load_v(tile, 0, kv_slot)
            kv_slot.commit()
            tile = tiles.next(tile)
        q_producer.tail()
        kv_producer.tail()

    @cute.jit
    def mma(self, ops, tiles, ends):
        """S(i), then O += P(i+1) V: while a block's softmax runs, the products of its neighbours do."""
        q_consumer, kv_consumer = ends.q, ends.kv
        p_consumer, t_consumer = ends.p, ends.t
        s_signal, o_signal = ends.s, ends.o
        following = ops.first_buffer()
        tile = tiles.first()
        while tile.valid:
            q_slot = q_consumer.wait_and_advance()
            k_slot = kv_consumer.wait_and_advance()
            ops.qk(following, q_slot, k_slot)  # S = Q K^T, last block
            s_signal.post(following)
            k_slot.release()
            following = 1 - following
            for i in range(1, tile.n_blocks):
                k_slot = kv_consumer.wait_and_advance()
                ops.qk(following, q_slot, k_slot)  # S(i), over P(i+2): in order behind it
                s_signal.post(following)
                k_slot.release()
                following = 1 - following
                v_slot = kv_consumer.wait_and_advance()
                p_buffer = p_consumer.wait_and_advance()
                ops.pv_head(p_buffer, v_slot, i > 1)  # O (+)= P(i+1) V, first columns of P
                t_buffer = t_consumer.wait_and_advance()
                ops.pv_tail(t_buffer, v_slot)
                o_signal.post()
                v_slot.release()
            q_slot.release()
            v_slot = kv_consumer.wait_and_advance()
            p_buffer = p_consumer.wait_and_advance()
            ops.pv_head(p_buffer, v_slot, tile.n_blocks > 1)
            t_buffer = t_consumer.wait_and_advance()
            ops.pv_tail(t_buffer, v_slot)
            o_signal.post()
            v_slot.release()
            tile = tiles.next(tile)

    @cute.jit
    def softmax(self, ops, tiles, ends):
        """One row a thread: P = exp(S - shift) over S, and row sums."""
        s_consumer, p_signal, t_signal = ends.s, ends.p, ends.t
        m_signal, l_signal, f_signal = ends.m, ends.l, ends.f
        tile = tiles.first()
        while tile.valid:
            row_shift, row_sum = ops.begin(tile)
            for phase in ops.phases(tile):  # masked blocks, and others: unrolled
                for i in range(phase.begin, phase.end):
                    buffer = s_consumer.wait_and_advance()
                    scores = ops.load_s(tile, tile.n_blocks - 1 - i, phase, buffer)
                    row_shift, factor = ops.move_shift(scores, row_shift, phase)
                    ops.put_factor(factor, buffer)
                    m_signal.post(buffer)
                    ops.exp_head(scores, row_shift, phase, buffer)
                    p_signal.post(buffer)
                    ops.exp_tail(scores, row_shift, phase, buffer)
                    t_signal.post(buffer)
                    row_sum = ops.add_sum(scores, row_sum, factor)
            f_signal.wait()  # the last tile's has been read
            ops.put_inverse(tile, row_shift, row_sum)
            l_signal.post()
            ops.store_lse(tile, row_shift, row_sum)
            tile = tiles.next(tile)

    @cute.jit
    def correction(self, ops, tiles, ends):
        """O follows a moved shift, behind the P V before; at the end O over the row sum goes out in parts."""
        o_producer, m_consumer, p_signal = ends.slots, ends.m, ends.p
        o_signal, l_signal, f_signal = ends.o, ends.l, ends.f
        tile = tiles.first()
        while tile.valid:
            buffer = m_consumer.wait_and_advance()
            p_signal.post(buffer)  # the first P V overwrites O: nothing to rescale
            for _ in range(1, tile.n_blocks):
                buffer = m_consumer.wait_and_advance()
                factor = ops.get_factor(buffer)
                o_signal.wait()  # P(i+1) V is done
                ops.rescale_o(0, factor)
                p_signal.post(buffer)
            l_signal.wait()
            inverse = ops.get_inverse(0)
            f_signal.post()
            o_signal.wait()
            for part in range(ops.parts):
                o_slot = o_producer.acquire_and_advance()
                ops.finish_o(tile, part, o_slot, inverse)
                o_slot.commit()
            tile = tiles.next(tile)

    @cute.jit
    def store(self, ops, tiles, o_consumer):
        """O from shared to global memory, a part at a time."""
        tile = tiles.first()
        while tile.valid:
            for part in range(ops.parts):
                o_slot = o_consumer.wait_and_advance()
                ops.store_o(tile, part, o_slot)
                ops.wait_store()  # it has read its slot
                o_slot.release()
            tile = tiles.next(tile)

    @cute.jit
    def idle(self, tiles):
        """Warps of a pair that have no work: a cluster's barrier, where all meet between passes, counts them."""
        tiles.meet()
