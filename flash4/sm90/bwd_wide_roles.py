"""Schedule of the Hopper backward for head dims above 128: one function per warp role; see ``bwd_roles``.

The two MMA warpgroups have roles of their own: one has dV in its registers, the other dK. P goes from the first to the
second, dS back.
"""

import cutlass.cute as cute

from flash4.sm90.bwd_roles import BackwardRoles


class WideBackwardRoles(BackwardRoles):
    """Roles ``load`` (as in the narrow kernel), ``mma_v`` and ``mma_k`` (a WGMMA warpgroup each) and ``reduce``."""

    @cute.jit
    def mma_v(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """S^T, P, dV and the even parts of dQ. What ``mma_k`` does with P lies under dV.

        The second part waits for its box under the next S, whose accumulator has room beside it.
        """
        tile = tiles.first()
        while tile.valid:
            ops.begin()  # dV = 0
            k_slot = k_consumer.wait_and_advance()
            v_slot = v_consumer.wait_and_advance()  # its memory: dV leaves through it
            for phase in ops.phases(tile):  # masked steps, then the others: unrolled
                for i in range(phase.begin, phase.end):
                    q_slot = q_consumer.wait_and_advance()
                    s = ops.s(k_slot, q_slot)  # S^T = K Q^T
                    for rest in ops.rest:  # of the last step: none or one, unrolled
                        if i > 0:
                            outbox.acquire()
                            ops.put_dq(rest)
                            outbox.commit()
                    ops.wait_mma(0)  # S is there
                    ops.softmax(tile, i, s, q_slot, phase)  # P = exp(scale S - LSE)
                    q_slot.release()
                    ops.put_p(s)  # ``mma_k`` has read the last one: its dS came after that
                    exchange.post_p()
                    do_slot = do_consumer.wait_and_advance()
                    ops.dv(do_slot)  # dV += P^T dO
                    exchange.wait_ds()
                    dq = ops.dq(i, k_slot)  # a part of dQ = dS K
                    ops.dq_rest(i, k_slot)  # another, if there is one
                    ops.wait_mma(2)  # dV is there
                    do_slot.release()
                    ops.wait_mma(1)  # the first part is there
                    outbox.acquire()
                    ops.put_dq(dq)  # for ``reduce``
                    outbox.commit()
                    ops.wait_mma(0)
            for rest in ops.rest:
                outbox.acquire()
                ops.put_dq(rest)
                outbox.commit()
            exchange.sync()  # nobody reads K and V any more
            ops.store_dv(tile)
            ops.wait_store()
            v_slot.release()
            k_slot.release()
            tile = tiles.next(tile)

    @cute.jit
    def mma_k(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """dP^T, dS, dK and the odd parts of dQ."""
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
                ops.ds(i, scores, dp, do_slot)  # dS = P (dP - D), to registers and shared memory
                do_slot.release()
                exchange.post_ds()
                dq = ops.dq(i, k_slot)  # a part of dQ = dS K
                ops.dk(q_slot)  # dK += dS^T Q
                ops.wait_mma(1)  # the part is there
                outbox.acquire()
                ops.put_dq(dq)  # for ``reduce``
                outbox.commit()
                ops.dq_rest(i, k_slot)  # another, if there is one
                ops.wait_mma(1)  # dK is there; Q is free
                q_slot.release()
                ops.wait_mma(0)
                for rest in ops.rest:  # none or one, unrolled
                    outbox.acquire()
                    ops.put_dq(rest)
                    outbox.commit()
            exchange.sync()  # nobody reads K and V any more
            ops.store_dk(tile)
            ops.wait_store()
            v_slot.release()
            k_slot.release()
            tile = tiles.next(tile)

    @cute.jit
    def reduce(self, ops, tiles, inbox):
        """Adds one warpgroup's parts of each dQ to the sums in global memory, by turns if their order is fixed."""
        inbox.open()
        tile = tiles.first()
        while tile.valid:
            for i in range(0, tile.steps):
                ops.wait_turn(tile, i)  # the tiles before have added theirs
                for part in range(0, ops.parts):
                    inbox.wait()
                    ops.add_dq(tile, i, part)
                    ops.wait_read()
                    inbox.release()
                ops.pass_turn(tile, i)  # what was added is written
            tile = tiles.next(tile)
        ops.drain()
