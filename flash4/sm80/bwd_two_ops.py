"""Verbs of the Ampere backward with two roles, where they are not those of ``bwd_ops``."""

from dataclasses import dataclass
from itertools import product

import cutlass.cute as cute
from cutlass import Float32

from flash4.common.graph import WARP
from flash4.sm80.bwd_config import FLOAT_BYTES
from flash4.sm80.bwd_ops import BackwardOps, load_pair
from flash4.sm80.copies import put_rows
from flash4.sm80.fwd_config import ATOM_ROWS
from flash4.sm80.products import element, rows_of
from flash4.sm80.shared_rows import CHUNK, CHUNK_BYTES

# Named barriers; 0 is that of the CTA.
BARRIER_P = (
    1  # ``mma_v`` has put P; where P is handed over, that of each pair of warps from here on
)
BARRIER_ROLE = 2  # the warps of ``mma_v`` have met; one more: those of ``mma_k``


@dataclass(frozen=True)
class TwoRolesOps(BackwardOps):
    """Verbs of ``mma_v``, which has no ``dk_acc``, and of ``mma_k``, which has no ``dv_acc``."""

    role_warp: object  # number of this warp in its role
    role: int

    @property
    def first_row(self):
        """First of this warp's keys of S or dP."""
        return self.role_warp % self.config.key_warps * (self.config.key_atoms * ATOM_ROWS)

    @property
    def part(self):
        """Which part of the queries this warp has of S or dP."""
        return 0 if self.keeps_p else self.role_warp // self.config.key_warps

    @property
    def first_sum_row(self):
        """First of this warp's keys of dV or dK; without its own it has all."""
        return self.first_row if self.keeps_p else 0

    @property
    def column_part(self):
        """Which part of the columns of dV or dK."""
        return 0 if self.keeps_p else self.role_warp

    # Meetings.

    def post_p(self):
        """``mma_v``: P is there."""
        cute.arch.barrier_arrive(**self._meeting_of_p)

    def wait_p(self):
        """``mma_k``: wait for P."""
        cute.arch.barrier(**self._meeting_of_p)

    @property
    def _meeting_of_p(self):
        if self.config.hands_over:
            return {"barrier_id": BARRIER_P + self.role_warp, "number_of_threads": 2 * WARP}
        return {"barrier_id": BARRIER_P, "number_of_threads": self.config.threads}

    def meet_role(self):
        """Meet the warps of this role."""
        threads = self.config.threads // 2
        cute.arch.barrier(barrier_id=BARRIER_ROLE + self.role, number_of_threads=threads)

    # P and dS.

    def probabilities(self, tile, i, s, phase):
        """P^T = exp2(scale_log2 S^T - LSE), in 16 bit; hidden pairs give 0."""
        c, S, lane = self.config, rows_of(s), self.lane
        slot, first = i % c.stages * c.statistics_bytes, 2 * (lane % 4)
        first = first + self.part * (c.tile_m // c.splits)
        place = self._place(tile, i, first, lane) if phase.masked or c.alibi else None
        for pair in range(cute.size(S, mode=[1]) // 2):
            lse = load_pair(self.shared.lse + slot + (8 * pair + first) * FLOAT_BYTES)
            for e in range(2):
                j = 2 * pair + e
                for r in range(cute.size(S, mode=[0])):
                    S[r, j], _ = self._probability(S[r, j], lse[e], (place, r, j), phase.masked)
        return self._rounded(s)

    def ds(self, i, dp):
        """dS^T = P^T (dP^T - D), in 16 bit, of P in shared memory."""
        c, lane, rows = self.config, self.lane, self.config.rows("p")
        slot, first = i % c.stages * c.statistics_bytes, 2 * (lane % 4)
        first = first + self.part * (c.tile_m // c.splits)
        _, groups, atoms = dp.shape
        if c.hands_over:
            pairs = [self._handed(i, number) for number in range(groups // 2)]
        else:
            at = self.shared.p + rows.of_lane(lane, by_columns=False)
            at = at + self.first_row * rows.row_bytes
            pairs = rows.run_of_pairs(at, self.part * (groups // 2), groups // 2)
        for number, at_pair in enumerate(pairs):
            columns = [
                load_pair(self.shared.delta + slot + (8 * group + first) * FLOAT_BYTES)
                for group in (2 * number, 2 * number + 1)
            ]
            found = self._taken(at_pair) if c.hands_over else self._atoms(rows, at_pair, atoms)
            for m, p in enumerate(found):
                for k in range(8):  # of an atom's two groups: (2 columns, 2 rows, 2 groups)
                    place = (k % 4, 2 * number + k // 4, m)
                    dp[place] = Float32(p[k]) * (dp[place] - columns[k // 4][k % 2])
        if c.hands_over:
            cute.arch.sync_warp()  # all lanes have theirs: dS may take its place
        return self._rounded(dp)

    def _rounded(self, x):
        rounded = cute.make_rmem_tensor(x.layout, element(self.config))
        rounded.store(x.load().to(element(self.config)))
        return rounded

    def put_p(self, i, p):
        """P^T into shared memory."""
        if not self.config.hands_over:
            self._put(p, "p", self.shared.p)
            return
        for number, m in product(range(p.shape[1] // 2), range(p.shape[2])):
            source = p.iterator + (CHUNK * number + m * 4 * p.shape[1])
            numbers = cute.make_tensor(source, cute.make_layout(CHUNK))
            cute.autovec_copy(numbers, self._chunk(self._handed(i, number, m)))

    def _taken(self, at):
        """Numbers of P of two groups of columns, of each atom, as a lane of ``mma_v`` has put them for this one."""
        found = []
        for m in range(self.config.key_atoms):
            found.append(cute.make_rmem_tensor(CHUNK, element(self.config)))
            cute.autovec_copy(self._chunk(at + m * (WARP * CHUNK_BYTES)), found[-1])
        return found

    def _handed(self, i, number, m=0):
        """Where this lane's numbers of P are, of groups ``2 number`` and the next and atom ``m``: within its warp's rows of dS."""
        first = (number * self.config.key_atoms + m) * WARP
        at = self._ds(i) + self.first_row * self.config.rows("ds").row_bytes
        return at + (self.lane + first) * CHUNK_BYTES

    def _chunk(self, at):
        """View of 16 bytes of shared memory."""
        dtype = element(self.config)
        pointer = cute.make_ptr(dtype, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        return cute.make_tensor(pointer, cute.make_layout(CHUNK))

    def put_ds(self, i, ds):
        """dS^T into shared memory."""
        self._put(ds, "ds", self._ds(i))

    def _put(self, x, name, base):
        first_group = self.part * (self.config.tile_m // self.config.splits // 8)
        put_rows(x, base, self.config.rows(name), self.first_row, self.lane, first_group)

    @cute.jit
    def add_dq_of(self, tile, i):
        """Multiply this warp's part of dQ of a step, if there is one, and add it to the sums."""
        if i >= 0:
            self.add_dq(tile, i, self.dq(i))
