"""Schedule of the Hopper backward in which the warpgroups multiply by turns; see ``bwd_late_roles``.

dQ comes a step late here too, so that a warpgroup's products, five in a row, need nothing that the other one computes meanwhile:
while one multiplies, the other computes P and dS.
"""

import cutlass.cute as cute

from flash4.sm90.bwd_roles import BackwardRoles


class AlternateRoles(BackwardRoles):
    """Roles of ``BackwardRoles``, with another ``mma``. ``count`` numbers the dS of all tiles."""

    @cute.jit
    def mma(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """A turn: dQ, dV and dK of a step, then S and dP of the next one."""
        exchange.open()
        exchange.open_turns()
        count = 0
        tile = tiles.first()
        while tile.valid:
            ops.begin(tile)  # dK = dV = 0
            k_slot = k_consumer.wait_and_advance()
            v_slot = v_consumer.wait_and_advance()
            exchange.take_turn()
            for phase in ops.phases(tile):  # masked steps, then the others: unrolled
                for i in range(phase.begin, phase.end):
                    q_slot = q_consumer.wait_and_advance()
                    s = ops.s(k_slot, q_slot)  # S^T = K Q^T
                    do_slot = do_consumer.wait_and_advance()
                    dp = ops.dp(v_slot, do_slot)  # dP^T = V dO^T
                    exchange.pass_turn()
                    ops.wait_mma(1)  # S is there
                    ops.softmax(tile, i, s, q_slot, phase)  # P = exp(scale S - LSE)
                    ops.wait_mma(0)  # dP is there
                    count = count + 1
                    # The other has multiplied the dS of two steps before, and so written that of the one before.
                    exchange.acquire(count)
                    ops.ds(count, s, dp, do_slot)  # dS = P (dP - D), to registers and shared memory
                    exchange.take_turn()
                    dq = ops.dq(
                        count - 1, k_slot
                    )  # dQ = dS K of the step before; dropped in the first
                    ops.dv(do_slot)  # dV += P^T dO
                    ops.dk(q_slot)  # dK += dS^T Q
                    ops.wait_mma(2)  # dQ is there, dV and dK still in flight
                    exchange.release(count - 1)
                    if i > 0:
                        outbox.acquire()
                        ops.put_dq(dq)  # for ``reduce``
                        outbox.commit()
                    ops.wait_mma(1)  # dV is there
                    do_slot.release()
                    ops.wait_mma(0)  # dK is there; Q is free
                    q_slot.release()
            exchange.pass_turn()
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
