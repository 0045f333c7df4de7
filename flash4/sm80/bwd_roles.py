"""Schedule of the Ampere backward: what every warp of a CTA does for its tile of keys; see ``fwd_roles``.

Keys stay; blocks of queries come by, of every query head that shares the KV head.
"""

import cutlass.cute as cute


class BackwardRoles:
    """The one role: all warps copy and multiply alike, each its own keys of the tile."""

    @cute.jit
    def differentiate(self, ops, tiles):
        """Q, dO and what is known of their rows are copied a step ahead.

        Keys are rows: S^T, dP^T. So P and dS are operands of dV and dK as they are, in registers, and only dS has to pass
        from warp to warp, for dQ.
        """
        tile = tiles.first()
        if tile.valid:
            ops.begin(tile)  # dK = dV = 0
            ops.copy_keys(tile)
            ops.copy_step(tile, 0)
            ops.commit()
            for phase in ops.phases(tile):  # masked steps, then the others: unrolled
                for i in range(phase.begin, phase.end):
                    ops.wait_copies()  # this warp's part of step i has landed
                    ops.sync()  # and so have all others'; all are through with the step before
                    if ops.copies_ahead:
                        ops.copy_step(tile, i + 1)
                        ops.commit()
                    s = ops.s(i)  # S^T = K Q^T
                    dp = ops.dp(i)  # dP^T = V dO^T
                    p, ds = ops.softmax(tile, i, s, dp, phase)  # P = exp(S - LSE), dS = P (dP - D)
                    ops.put_ds(p, ds)
                    if ops.keeps_p:
                        ops.dv(i, p)  # dV += P^T dO
                        ops.sync()  # dS of all keys is there
                    else:
                        ops.sync()  # and so is P, which warps with the same keys have split
                        ops.dv(i, p)
                    ops.dk(i, ds)  # dK += dS^T Q
                    dq = ops.dq()  # dQ = dS K
                    ops.wait_turn(tile, i)  # the tiles before have added theirs
                    ops.add_dq(tile, i, dq)
                    ops.pass_turn(tile, i)
                    if not ops.copies_ahead:
                        ops.sync()  # nobody reads this step's Q and dO any more
                        ops.copy_step(tile, i + 1)
                        ops.commit()
            ops.sync()  # nobody reads K and V any more
            ops.store(tile)  # dK and dV, through their memory
