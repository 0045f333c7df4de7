"""Schedule of the Ampere backward for head dims above 32: half of the warps keep dV, the others dK; see ``bwd_roles``.

S^T and P^T are one half's, dP^T and dS^T the other's; P reaches the other half through shared memory, in 16 bit. A warp that
has 32 keys of one product, and the same keys of one sum, or all keys of some of its columns, reads less shared memory than
one that has half as much of each. Up to head dim 128 a warp's sum is of its own keys: P, or dS, are operands as they are.
With two slots of Q and dO the product of dQ is late, in the next step: so that while one half takes exponentials, the other
multiplies. With one slot it is beside the next step's copies.
"""

import cutlass.cute as cute


class TwoBackwardRoles:
    """The two roles; both add half of dQ, and ``mma_k``, which has no exponentials, copies Q and dO for both."""

    @cute.jit
    def mma_v(self, ops, tiles):
        """S, P, dV, and its half of dQ."""
        tile = tiles.first()
        if tile.valid:
            ops.begin(tile)  # dV = 0
            ops.copy_keys(tile)
            ops.commit()
            ops.wait_copies()  # of this warp; ``mma_k`` has those of steps
            for phase in ops.phases(tile):  # masked steps, then the others: unrolled
                for i in range(phase.begin, phase.end):
                    ops.sync()  # Q and dO of step i have landed; all are through with the step before
                    for run in ops.runs(phase):  # of queries: unrolled
                        s = ops.s(i, run)  # S^T = K Q^T
                        p = ops.probabilities(tile, i, s, phase, run)  # P = exp(S - LSE)
                        ops.put_p(i, p, run)
                        if run.last:
                            ops.post_p()
                        if not ops.keeps_p:
                            ops.meet_role()  # P of all keys is there
                        ops.dv(i, p, run)  # dV += P^T dO
                    if ops.copies_ahead:
                        ops.add_dq_of(tile, i - 1)  # dQ = dS K; dS is there since the step began
                    else:
                        ops.sync()  # nobody reads this step's Q and dO any more; dS is there
                        ops.add_dq_of(tile, i)
            ops.sync()
            if ops.copies_ahead:
                ops.add_dq_of(tile, tile.steps - 1)
                ops.sync()  # nobody reads K any more
            ops.store(tile)  # dV, through the memory of V

    @cute.jit
    def mma_k(self, ops, tiles):
        """dP, dS, dK, and its half of dQ."""
        tile = tiles.first()
        if tile.valid:
            ops.begin(tile)  # dK = 0
            ops.copy_keys(tile)
            ops.copy_step(tile, 0)
            ops.commit()
            for i in range(tile.steps):  # of any phase: what is hidden is 0 in P
                ops.wait_copies()  # this warp's part of step i has landed
                ops.sync()  # and so have all others'
                if ops.copies_ahead:
                    ops.copy_step(tile, i + 1)
                    ops.commit()
                    ops.add_dq_of(tile, i - 1)  # while ``mma_v`` takes exponentials
                for run in ops.runs():
                    dp = ops.dp(i, run)  # dP^T = V dO^T
                    if run.first:
                        ops.wait_p()
                    ds = ops.ds(i, dp, run)  # dS = P (dP - D)
                    ops.put_ds(i, ds, run)
                    if not ops.keeps_p:
                        ops.meet_role()  # dS of all keys is there
                    ops.dk(i, ds, run)  # dK += dS^T Q
                if not ops.copies_ahead:
                    ops.sync()
                    ops.copy_step(tile, i + 1)
                    ops.commit()
                    ops.add_dq_of(tile, i)
            ops.sync()
            if ops.copies_ahead:
                ops.add_dq_of(tile, tile.steps - 1)
                ops.sync()
            ops.store(tile)  # dK, through the memory of K
