"""Schedule of the Ampere forward: what every warp of a CTA does for its tile; runs in plain Python too (``flash4.sim``)."""

import cutlass.cute as cute


class ForwardRoles:
    """The one role: all warps copy, multiply and store alike, each its own rows of the tile."""

    @cute.jit
    def attend(self, ops, tiles):
        """K and V are copied ``stages - 1`` blocks ahead, from the last block to the first.

        One barrier a block is all: behind it every warp's part of the block has landed, and every warp is through with the
        block before, whose slot the next copies fill.
        """
        tile = tiles.first()
        if tile.valid:
            ops.begin(tile)  # O = 0, m = -inf, l = 0
            ops.copy_q(tile)
            for i in ops.prologue:  # unrolled
                ops.copy_first(tile, i)
                ops.commit()
            for phase in ops.phases(tile):  # masked blocks, then the others: unrolled
                for i in range(phase.begin, phase.end):
                    ops.wait_copies()  # this warp's part of block i has landed
                    ops.sync()  # and so have all others'
                    ops.copy_next(tile, i)
                    ops.commit()
                    s = ops.qk(i)  # S = Q K^T, counted down
                    ops.move_shift(tile, i, s, phase)  # m, and O and l with it
                    ops.softmax_pv(i, s, phase)  # P = exp(S - m), l += rowsum P, O += P V
            ops.store(tile)  # O / l, LSE
