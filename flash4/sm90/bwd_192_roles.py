"""Schedule of the Hopper backward whose dQ has three parts for two warpgroups; see ``bwd_roles``."""

import cutlass.cute as cute

from flash4.sm90.bwd_roles import BackwardRoles


class Backward192Roles(BackwardRoles):
    """Roles of ``BackwardRoles``, with another ``mma``."""

    @cute.jit
    def mma(self, ops, tiles, k_consumer, v_consumer, q_consumer, do_consumer, exchange, outbox):
        """As in the narrow kernel. The shared part of dQ comes when dV has left the registers of P."""
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
                    scores = ops.softmax(tile, i, s, q_slot, phase)  # P = exp(scale S - LSE)
                    ops.wait_mma(0)  # dP is there
                    ops.ds(
                        i, scores, dp, do_slot
                    )  # dS = P (dP - D), to registers and shared memory
                    ops.dv(do_slot)  # dV += P^T dO
                    exchange.sync()  # the dS of both warpgroups is in shared memory
                    dq = ops.dq(i, k_slot)  # this warpgroup's part of dQ^T = K^T dS^T
                    ops.wait_mma(1)  # dV is there
                    half = ops.dq_half(i, k_slot)  # of the shared part
                    ops.dk(q_slot)  # dK += dS^T Q
                    ops.wait_mma(1)  # dQ is there, dK still in flight
                    do_slot.release()
                    outbox.acquire()
                    ops.put_dq(dq, half)  # for ``reduce``
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
