"""Schedule of the Hopper backward: one function per warp role, each with its whole loop; see ``fwd_roles``.

A tile is a block of keys, which stays; blocks of queries come by, of every query head that shares the KV head.
"""

import cutlass.cute as cute


class BackwardRoles:
    """Roles ``load`` (one TMA warp), ``mma`` (two WGMMA warpgroups) and ``reduce`` (one warp for each of them)."""

    @cute.jit
    def load(self, ops, tiles, k_producer, v_producer, q_producer, do_producer):
        """K and V once per tile, Q with its LSE and dO with its D once per step."""
        tile = tiles.first()
        while tile.valid:
            k_slot = k_producer.acquire_and_advance()
            ops.load_k(tile, k_slot)
            k_slot.commit()
            q_slot = q_producer.acquire_and_advance()
            ops.load_q(tile, 0, q_slot)
            q_slot.commit()
            v_slot = v_producer.acquire_and_advance()
            ops.load_v(tile, v_slot)
            v_slot.commit()
            do_slot = do_producer.acquire_and_advance()
            ops.load_do(tile, 0, do_slot)
            do_slot.commit()
            for i in range(1, tile.steps):
                q_slot = q_producer.acquire_and_advance()
                ops.load_q(tile, i, q_slot)
                q_slot.commit()
                do_slot = do_producer.acquire_and_advance()
                ops.load_do(tile, i, do_slot)
                do_slot.commit()
            tile = tiles.next(tile)

    @cute.jit
    def mma(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """Keys are rows: S^T, dP^T. dV is issued only after dS, so that P in float32 is dead by then."""
        tile = tiles.first()
        while tile.valid:
            ops.begin(tile)  # dK = dV = 0
            k_slot = k_consumer.wait_and_advance()
            v_slot = v_consumer.wait_and_advance()
            for phase in ops.phases(tile):  # masked steps, then the others: unrolled
                for i in range(phase.begin, phase.end):
                    q_slot = q_consumer.wait_and_advance()
                    s = ops.s(k_slot, q_slot)  # S^T = K Q^T
                    do_slot = do_consumer.wait_and_advance()
                    dp = ops.dp(v_slot, do_slot)  # dP^T = V dO^T
                    ops.wait_mma(1)  # S is there
                    ops.softmax(tile, i, s, q_slot, phase)  # P = exp(scale S - LSE)
                    ops.wait_mma(0)  # dP is there
                    ops.ds(i, s, dp, do_slot)  # dS = P (dP - D), to registers and shared memory
                    ops.dv(do_slot)  # dV += P^T dO
                    exchange.sync()  # the dS of both warpgroups is in shared memory
                    dq = ops.dq(i, k_slot)  # dQ = dS K
                    ops.wait_mma(1)  # dV is there
                    ops.dk(q_slot)  # dK += dS^T Q
                    ops.wait_mma(1)  # dQ is there, dK still in flight
                    do_slot.release()
                    outbox.acquire()
                    ops.put_dq(dq)  # for ``reduce``
                    outbox.commit()
                    ops.wait_mma(0)  # dK is there; Q is free
                    q_slot.release()
            if ops.handed_out:
                v_slot.release()
                k_slot.release()
                outbox.acquire()
                ops.put_dv()  # for ``reduce`` too, while the next tile begins
                outbox.commit()
                outbox.acquire()
                ops.put_dk()
                outbox.commit()
            else:
                exchange.sync()  # nobody reads K and V any more
                ops.store(tile)  # dK and dV, through their memory
                ops.wait_store()
                v_slot.release()
                k_slot.release()
            tile = tiles.next(tile)

    @cute.jit
    def reduce(self, ops, tiles, inbox):
        """Adds one warpgroup's part of each dQ to the sums in global memory, by turns if their order is fixed.

        Where tiles are handed out it stores dK and dV too.
        """
        inbox.open()
        tile = tiles.first()
        while tile.valid:
            for i in range(0, tile.steps):
                ops.wait_turn(tile, i)  # the tiles before have added theirs
                inbox.wait()
                ops.add_dq(tile, i)
                ops.wait_read()
                inbox.release()
                ops.pass_turn(tile, i)  # what was added is written
            if ops.handed_out:
                inbox.wait()
                ops.store_dv(tile)
                ops.wait_read()
                inbox.release()
                inbox.wait()
                ops.store_dk(tile)
                ops.wait_read()
                inbox.release()
            tile = tiles.next(tile)
        ops.drain()
