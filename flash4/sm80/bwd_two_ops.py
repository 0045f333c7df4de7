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
    def asks_for_lanes(self) -> bool:
        """See ``BackwardConfig.asks_for_lanes``."""
        return self.config.asks_for_lanes(self.role)

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

    def runs(self, phase=None):
        """Runs of queries in which this role takes a step; of the role with P those of a phase."""
        return self.config.runs(self.role, phase is not None and phase.masked)

    def _first_column(self, run, lane):
        """First of this thread's columns of a run of S or dP."""
        own = self.config.tile_m // self.config.splits
        return 2 * (lane % 4) + self.part * own + run.of(own)[0]

    def probabilities(self, tile, i, s, phase, run):
        """P^T = exp2(scale_log2 S^T - LSE), in 16 bit; hidden pairs give 0."""
        c, S, lane = self.config, rows_of(s), self.lane
        slot, first = i % c.stages * c.statistics_bytes, self._first_column(run, lane)
        place = self._place(tile, i, first, lane) if phase.masked or c.alibi else None
        for pair in range(cute.size(S, mode=[1]) // 2):
            lse = load_pair(self.shared.lse + slot + (8 * pair + first) * FLOAT_BYTES)
            for e in range(2):
                j = 2 * pair + e
                for r in range(cute.size(S, mode=[0])):
                    S[r, j] = self._pair(S[r, j], lse[e], (place, r, j), phase.masked).p
        return self._rounded(s)

    def ds(self, i, dp, run):
        """dS^T = P^T (dP^T - D), in 16 bit, of P in shared memory."""
        c, lane, rows = self.config, self.lane, self.config.rows("p")
        slot, first = i % c.stages * c.statistics_bytes, self._first_column(run, lane)
        _, groups, atoms = dp.shape
        if c.hands_over:
            pairs = self._handed(i, run)
        else:
            at = self.shared.p + rows.of_lane(lane, by_columns=False)
            at = at + self.first_row * rows.row_bytes
            pairs = rows.run_of_pairs(at, self.part * (groups // 2), groups // 2)
        for number, at_pair in enumerate(pairs):
            columns = [
                load_pair(self.shared.delta + slot + (8 * group + first) * FLOAT_BYTES)
                for group in (2 * number, 2 * number + 1)
            ]
            found = (
                self._atoms(rows, at_pair, atoms) if not c.hands_over else map(self._taken, at_pair)
            )
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

    def put_p(self, i, p, run):
        """P^T into shared memory."""
        if not self.config.hands_over:
            self._put(p, "p", self.shared.p, run)
            return
        for (number, places), m in product(enumerate(self._handed(i, run)), range(p.shape[2])):
            source = p.iterator + (CHUNK * number + m * 4 * p.shape[1])
            numbers = cute.make_tensor(source, cute.make_layout(CHUNK))
            cute.autovec_copy(numbers, self._chunk(places[m]))

    def _taken(self, at):
        """Numbers of P of two groups of columns of an atom, as a lane of ``mma_v`` has put them for this one."""
        taken = cute.make_rmem_tensor(CHUNK, element(self.config))
        cute.autovec_copy(self._chunk(at), taken)
        return taken

    def _handed(self, i, run):
        """Where this lane's numbers of P are: for every two groups of columns those of each atom.

        Each lane has a row of its warp's dS; of two groups two atoms lie where two groups of dS do, so that runs are apart.
        """
        rows, atoms = self.config.rows("ds"), self.config.key_atoms
        at = self._ds(i) + self.first_row * rows.row_bytes + rows.at(self.lane, 0)
        chunks = run.of(self.config.tile_m // CHUNK)
        places = rows.run_of_chunks(at, chunks[0], len(chunks))
        return [places[n : n + atoms] for n in range(0, len(places), atoms)]

    def _chunk(self, at):
        """View of 16 bytes of shared memory."""
        dtype = element(self.config)
        pointer = cute.make_ptr(dtype, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        return cute.make_tensor(pointer, cute.make_layout(CHUNK))

    def put_ds(self, i, ds, run):
        """dS^T into shared memory."""
        self._put(ds, "ds", self._ds(i), run)

    def _put(self, x, name, base, run):
        own = self.config.tile_m // self.config.splits // 8
        first_group = self.part * own + run.of(own)[0]
        put_rows(x, base, self.config.rows(name), self.first_row, self.lane, first_group)

    @cute.jit
    def add_dq_of(self, tile, i):
        """Multiply this warp's part of dQ of a step, if there is one, and add it to the sums."""
        if i >= 0:
            for run in self.config.runs_of_dq(self.role):
                self.add_run(tile, i, self.dq(i, run), run)
                if not run.last:  # or the next one's products would begin before registers are free
                    cute.arch.sync_warp()
