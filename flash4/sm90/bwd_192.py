"""Backward attention for Hopper, head dims of Q and K above 128: host code and verbs, where not as in ``bwd``.

Roles, rings and steps are those of ``bwd``, with 48 queries a step. dQ^T = K^T dS^T has three parts of 64 head dims: the
warpgroups multiply one each, and the third one for half of the queries each.

Config and graph are in ``bwd_192_config``, the schedule in ``bwd_192_roles``.
"""

from dataclasses import dataclass

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32

from flash4.common.graph import WARPGROUP
from flash4.common.tma_views import permuted_view
from flash4.sm90.bwd import K_MAJOR, MN_MAJOR, BackwardSm90, TiledMmas
from flash4.sm90.bwd_192_roles import Backward192Roles
from flash4.sm90.bwd_config import MMA_WARPGROUPS
from flash4.sm90.bwd_ops import MmaOps
from flash4.sm90.fwd_config import MMA_ROWS
from flash4.sm90.fwd_ops import element, issue_mma

MMA_K = 16  # what one WGMMA contracts


@dataclass(frozen=True)
class TiledMmas192(TiledMmas):
    """The same, and dQ^T of the head dims that the warpgroups share, for half of the queries."""

    dq_shared: cute.TiledMma


@dataclass(frozen=True)
class Mma192Ops(MmaOps):
    """Verbs of the ``mma`` role."""

    mma_dq_shared: cute.TiledMma
    tDQrSharedK: cute.Tensor  # (MMA, 1, MMA_N, 1): K^T of the last 64 head dims
    tDQrHalfDS: cute.Tensor  # (MMA, 1, MMA_N, stages): dS of this warpgroup's half of the queries

    def s(self, k_slot, q_slot):
        """Issue S^T = K Q^T into a fresh accumulator: K may be wider than Q in shared memory."""
        S = cute.make_rmem_tensor(((2, 2, self.config.tile_m // 8), 1, 1), Float32)
        tSrQ = self.tSrQ[None, None, None, q_slot.index]
        tSrK = [self.tSrK[None, None, step, 0] for step in range(self.config.tile_d // MMA_K)]
        issue_mma(self.mma_s, S, tSrK, tSrQ, False)
        return S

    @property
    def dq_groups(self) -> int:
        """Groups of 8 queries of the part that a warpgroup has for itself."""
        return self.config.tile_m // 8

    def dq_half(self, i, k_slot):
        """Issue this warpgroup's half of the shared part of dQ^T into a fresh accumulator."""
        queries = self.config.tile_m // MMA_WARPGROUPS
        dQ = cute.make_rmem_tensor(((2, 2, queries // 8), 1, 1), Float32)
        tDQrDS = self.tDQrHalfDS[None, None, None, i % self.config.ds_stages]
        tDQrK = self.tDQrSharedK[None, None, None, 0]
        issue_mma(self.mma_dq_shared, dQ, tDQrK, tDQrDS, False)
        return dQ

    def put_dq(self, dq, half):
        """Registers -> box: the own part, behind it the half."""
        self.put_floats(dq, self.sDQ)
        behind = self.sDQ.iterator + cute.size(dq) * WARPGROUP
        self.put_floats(half, cute.make_tensor(behind, cute.make_layout(cute.size(half))))


class Backward192Sm90(BackwardSm90):
    """One Hopper backward kernel for head dims of Q and K above 128; see the module docstring."""

    def _schedule(self):
        """The role functions."""
        return Backward192Roles()

    def _tiled_mmas(self):
        """As in ``bwd``, and the shared part of dQ."""
        c, narrow = self.config, super()._tiled_mmas()
        shape = (MMA_ROWS, c.tile_m // MMA_WARPGROUPS)
        shared = hopper.make_trivial_tiled_mma(
            element(c), element(c), MN_MAJOR, K_MAJOR, Float32, (1, 1, 1), shape
        )
        return TiledMmas192(narrow.s, narrow.dk, narrow.dv, narrow.dq, shared)

    def _keys_of_dq(self, shared):
        """K^T (D, N, 1) of the head dims that one warpgroup has for itself."""
        own = (MMA_WARPGROUPS * MMA_ROWS, self.config.tile_n, 1)
        return cute.local_tile(permuted_view(shared.k, [1, 0, 2]), own, (0, 0, 0))

    def _mma_ops(self, mmas, operands, run_time, tiles, shared, place):
        """Verbs of the ``mma`` role."""
        c, (_, _, mine) = self.config, place
        keys = permuted_view(shared.k, [1, 0, 2])
        keys = cute.local_tile(keys, (MMA_ROWS, c.tile_n, 1), (MMA_WARPGROUPS, 0, 0))
        shape = (c.tile_m // MMA_WARPGROUPS, c.tile_n, c.ds_stages)
        half = cute.local_tile(shared.ds, shape, (mine, 0, 0))
        one = mmas.dq_shared.get_slice(0)
        return Mma192Ops(
            **self._mma_fields(mmas, operands, run_time, tiles, shared, place),
            mma_dq_shared=mmas.dq_shared,
            tDQrSharedK=mmas.dq_shared.make_fragment_A(one.partition_A(keys)),
            tDQrHalfDS=mmas.dq_shared.make_fragment_B(one.partition_B(half)),
        )
