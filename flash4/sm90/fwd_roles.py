"""Schedule of the Hopper forward: one function per warp role, each with its whole persistent loop.

The same source is compiled for the GPU and run in plain Python by ``flash4.sim``: a role sees only its ring ends, the
tile schedule and the verbs of ``ops``. See ``docs/dsl-rules.md`` for what may stand here.
"""

import cutlass.cute as cute


class ForwardRoles:
    """Roles ``load`` (one TMA warp) and ``mma`` (two to four WGMMA warpgroups)."""

    @cute.jit
    def load(self, ops, tiles, q_producer, k_producer, v_producer):
        """Q once per tile; K one block ahead of V, from the last block to the first."""
        tile = tiles.first()
        while tile.valid:
            q_slot = q_producer.acquire_and_advance()
            ops.load_q(tile, q_slot)
            q_slot.commit()
            k_slot = k_producer.acquire_and_advance()
            ops.load_k(tile, tile.n_blocks - 1, k_slot)
            k_slot.commit()
            for i in range(1, tile.n_blocks):
                n_block = tile.n_blocks - 1 - i
                k_slot = k_producer.acquire_and_advance()
                ops.load_k(tile, n_block, k_slot)
                k_slot.commit()
                v_slot = v_producer.acquire_and_advance()
                ops.load_v(tile, n_block + 1, v_slot)
                v_slot.commit()
            tile = tiles.ask(tile)  # for the next one; the answer comes while a slot is waited for
            v_slot = v_producer.acquire_and_advance()
            ops.load_v(tile, 0, v_slot)
            v_slot.commit()
            tile = tiles.next(tile)

    @cute.jit
    def mma(self, ops, tiles, q_consumer, k_consumer, v_consumer, turn):
        """S(i) = Q K^T is issued before O += P(i+1) V, so that softmax(i) runs beside P(i+1) V."""
        turn.open()
        tile = tiles.first()
        while tile.valid:
            ops.begin(tile)  # O = 0, m = -inf, l = 0
            q_slot = q_consumer.wait_and_advance()
            unseen = ops.unseen_blocks(tile)  # past every key that this warpgroup's rows see
            for _ in range(unseen):
                k_slot = k_consumer.wait_and_advance()
                k_slot.release()
                v_slot = v_consumer.wait_beside(k_slot)
                v_slot.release()
            k_slot = k_consumer.wait_and_advance()
            s_first = ops.qk(q_slot, k_slot)  # S = Q K^T, last block
            phases = ops.phases(tile)  # masked blocks, then the others; found beside the product
            ops.wait_mma(0)
            k_slot.release()
            ops.softmax_first(tile, tile.n_blocks - 1 - unseen, s_first)  # P = exp(S - m), l
            ops.convert_p(s_first)
            for phase in phases:  # unrolled
                for i in range(phase.begin, phase.end):
                    before = k_slot
                    k_slot = k_consumer.wait_and_advance()
                    turn.wait()
                    s = ops.qk(q_slot, k_slot)  # S(i) = Q K^T, counted down
                    v_slot = v_consumer.wait_beside(before)
                    ops.pv(v_slot)  # O += P(i+1) V
                    turn.pass_on()
                    ops.wait_mma(1)  # S(i) is there, O still in flight
                    k_slot.release()
                    k_consumer.look_ahead()  # the answers come beside the exponentials
                    v_consumer.look_ahead(k_slot)
                    ops.softmax(tile, tile.n_blocks - 1 - i, s, phase)
                    ops.wait_mma(0)  # O is there; P and V are free
                    v_slot.release()
                    ops.convert_p(s)
                    ops.rescale_o(phase)
            if not ops.o_borrows_q:
                q_slot.release()
            v_slot = v_consumer.wait_beside(k_slot)
            ops.pv(v_slot)
            ops.wait_mma(0)
            v_slot.release()
            for _ in range(
                ops.passed_blocks(tile)
            ):  # before every key that this warpgroup's rows see
                k_slot = k_consumer.wait_and_advance()
                k_slot.release()
                v_slot = v_consumer.wait_beside(k_slot)
                v_slot.release()
            ops.store(tile)  # O / l, LSE
            if ops.o_borrows_q:
                ops.wait_store()
                q_slot.release()
            tile = tiles.next(tile)
        ops.wait_store()
