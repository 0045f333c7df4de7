"""The Hopper backward for head dims of Q and K above 128, on a CPU: where not as ``sm90_bwd``."""

from dataclasses import dataclass

import numpy as np

from flash4.sim.sm90_bwd import (
    GROUPS,
    Call,
    MmaOps,
    Variation,
    backward_machines,
    simulate_backward,
)
from flash4.sim.sm90_fwd import matmul
from flash4.sm90.bwd_192_config import Backward192Config
from flash4.sm90.bwd_192_roles import Backward192Roles
from flash4.sm90.bwd_config import MMA_WARPGROUPS
from flash4.sm90.fwd_config import MMA_ROWS


@dataclass(frozen=True)
class Call192(Call):
    """One call of the kernel."""

    def place(self, key) -> tuple:
        """Where a key's sums lie in dQ, number by number: behind the own head dims, half of the queries of the shared ones."""
        c, (batch, head, block, part) = self.config, key
        half = c.tile_m // MMA_WARPGROUPS
        own = np.mgrid[: c.tile_m, part * MMA_ROWS : (part + 1) * MMA_ROWS]
        first = MMA_WARPGROUPS * MMA_ROWS
        shared = np.mgrid[part * half : (part + 1) * half, first : first + MMA_ROWS]
        rows, columns = (in_box(*both, c) for both in zip(own, shared, strict=True))
        return batch, head, block * c.tile_m + rows, columns


def in_box(own, half, config: Backward192Config) -> np.ndarray:
    """Numbers of both parts of a box, as an array of its shape."""
    return np.concatenate([own.ravel(), half.ravel()]).reshape(config.dq_shape)


class Mma192Ops(MmaOps):
    """Verbs of the ``mma`` role, for one warpgroup."""

    def dq(self, i, k_slot):
        """Issue this warpgroup's part of dQ = dS K into a fresh accumulator."""
        return self._multiply(i, k_slot, slice(None), self._group)

    def dq_half(self, i, k_slot):
        """Issue its half of the shared part."""
        half = self._config.tile_m // MMA_WARPGROUPS
        queries = slice(self._group * half, (self._group + 1) * half)
        return self._multiply(i, k_slot, queries, MMA_WARPGROUPS)

    def _multiply(self, i, k_slot, queries, part):
        width = slice(part * MMA_ROWS, (part + 1) * MMA_ROWS)
        rows = len(range(self._config.tile_m)[queries])
        acc = self._fragment("dQ", MMA_ROWS, rows)

        def product(first, second, keys):
            return matmul(np.concatenate([first, second]).T[queries], keys[:, width])

        stage = i % self._config.ds_stages
        halves = [self._regions["ds", stage, group] for group in GROUPS]
        self._queue.issue(acc, product, (*halves, k_slot.region), False, "dQ")
        return acc

    def put_dq(self, dq, half):
        """Registers -> box."""
        self._box.region.write(in_box(dq.values, half.values, self._config))


@dataclass(frozen=True)
class Variation192(Variation):
    """What a run may change."""

    roles: type = Backward192Roles
    call = Call192
    mma_ops = Mma192Ops


def simulate_backward_192(
    config: Backward192Config, tensors, options, workers=2, seed=0, variation=None, dlse=None
):
    """Run the kernel's roles on every tile of a problem; as ``simulate_backward``."""
    variation = variation or Variation192()
    return simulate_backward(config, tensors, options, workers, seed, variation, dlse)


def machines_192(config, tensors, options, workers, seed, variation=None, dlse=None):
    """Yield the machine and the call of every CTA; as ``backward_machines``."""
    variation = variation or Variation192()
    return backward_machines(config, tensors, options, workers, seed, variation, dlse)
