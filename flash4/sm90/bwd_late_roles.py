"""Schedule of the Hopper backward in which dQ comes a step late; see ``bwd_roles``.

A step multiplies the dS of the step before, so that no warpgroup waits for dS that the other one has yet to compute: one may
be up to half a step ahead, and compute P and dS while the other's products run.
"""

import cutlass.cute as cute

from flash4.sm90.bwd_roles import BackwardRoles


class LateRoles(BackwardRoles):
    """Roles of ``BackwardRoles``, with another ``mma``. ``count`` numbers the dS of all tiles."""

    @cute.jit
    def mma(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """dQ of a step is multiplied in the next one, and that of a tile's last step behind the loop."""
        exchange.open()
        count = 0
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
                    count = count + 1
                    # The other has multiplied the dS of two steps before, and so written that of the one before.
                    exchange.acquire(count)
                    ops.ds(count, s, dp, do_slot)  # dS = P (dP - D), to registers and shared memory
                    ops.dv(do_slot)  # dV += P^T dO
                    dq = ops.dq(
                        count - 1, k_slot
                    )  # dQ = dS K of the step before; dropped in the first
                    ops.wait_mma(1)  # dV is there
                    ops.dk(q_slot)  # dK += dS^T Q
                    ops.wait_mma(1)  # dQ is there, dK still in flight
                    exchange.release(count - 1)
                    do_slot.release()
                    if i > 0:
                        outbox.acquire()
                        ops.put_dq(dq)  # for ``reduce``
                        outbox.commit()
                    ops.wait_mma(0)  # dK is there; Q is free
                    q_slot.release()
            exchange.sync()
            dq = ops.dq(count, k_slot)
            ops.wait_mma(0)
            outbox.acquire()
            ops.put_dq(dq)
            outbox.commit()
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
