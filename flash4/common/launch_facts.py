"""What the launch of a kernel takes, by what its config says there is: the same on every architecture (no DSL).

``ops`` looks numbers and tensors up by these names; ``launch_arguments`` has them without data, for compiling.
"""

from flash4.common.geometry import KvBlocks, QueryBlocks
from flash4.common.mods import AUX, decode_aux

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")  # fields of CallOptions
COUNTERS = ("turns", "next_tile")  # of a backward, int32, in its workspace
FOUND_TILES = "found_tiles"  # (numbers, words) int32 there: the tiles of all numbers
WORDS = (*COUNTERS, FOUND_TILES)  # what is int32 there
LINE = 32  # numbers of 4 bytes; the counter of tiles, which all CTAs write, has a line of the cache to itself
UNEVEN_SECTION_HEADS = 16  # whose tiles, longest first, balance well and still share L2
HANDED_SECTION_HEADS = 8  # of sequences whose tiles are handed out: the rest balances those


def _present(given: dict[str, object]) -> tuple[str, ...]:
    return tuple(name for name, present in given.items() if present)


class LaunchFacts:
    """What configs of forwards and backwards share; their fields say which features there are."""

    aux = 0  # types of the tensors that mods read, where a config has no such field

    @property
    def varlen(self) -> bool:
        """Lengths of sequences are known on the GPU only."""
        return self.cu_q or self.cu_k or self.used_q or self.used_k

    def check_sides(self, left, right):
        """Check sides of a window against the config.

        Raises:
            ValueError: they are not those that the config says there are.
        """
        if (left is not None, right is not None) != (self.left, self.right):
            raise ValueError(f"window ({left}, {right}) for {self}")

    def _lengths(self) -> dict[str, bool]:
        present = (self.cu_q, self.cu_k, self.used_q, self.used_k)
        return dict(zip(LENGTHS, present, strict=True))

    def _aux(self) -> tuple[str, ...]:
        return tuple(f"{AUX}{i}" for i in range(len(decode_aux(self.aux))))


class ForwardLaunch(LaunchFacts):
    """What the launch of a forward takes."""

    @property
    def tile_q(self) -> int:
        """Queries per tile."""
        return self.tile_m // self.pack

    def blocks(self, left=None, right=None) -> KvBlocks:
        """Which KV blocks a tile visits; the sides of the window are those that the config says there are."""
        self.check_sides(left, right)
        return KvBlocks(self.tile_q, self.tile_n, self.causal, left, right)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Numbers that the launch takes, in order.

        ``scale`` is the factor of a score, or the cap; ``cap_scale`` the factor of a score within the cap.
        """
        given = {"cap_scale": self.softcap, "left": self.left, "right": self.right}
        return ("scale", *_present(given))

    @property
    def counters(self) -> dict[str, bool]:
        """Which counters the kernel takes, by name."""
        return {}

    @property
    def optional_tensors(self) -> tuple[str, ...]:
        """Tensors that the launch takes after q, k, v, out and lse, in order."""
        given = {"sink": self.sink, "alibi_slopes": self.alibi}
        return (*_present(given | self._lengths() | self.counters), *self._aux())


class BackwardLaunch(LaunchFacts):
    """What the launch of a backward takes, and what the kernels before and after it ask of it."""

    first_stores = False  # sums of dQ start from zero
    handed_out = False  # each tile has its CTA
    chained = False  # each kernel is launched when the one before has ended
    splits = 1  # CTAs, or pairs, that each have some of the columns of a tile's dQ, dK and dV
    swap_dq = False  # dQ is multiplied, not its transpose
    negates = False  # statistics are subtracted
    dq_lanes = 0  # sums of dQ lie as accumulators of warpgroups have them
    dq_turned = False  # nor as lanes have the transpose
    order_of_sums: dict[str, int] = {}  # what else ``FinishConfig`` must know of how they lie

    @property
    def ragged_q(self) -> bool:
        """Behind the last query of a sequence come rows that are not its own, and may hold anything."""
        return self.cu_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        """The same of keys and values."""
        return self.cu_k or self.used_k

    @property
    def team(self) -> int:
        """CTAs of a tile."""
        return self.ctas * self.splits

    @property
    def dq_width(self) -> int:
        """Head dims of dQ as it is multiplied and summed, and so of K in shared memory: at least ``tile_d``."""
        return self.tile_d

    def blocks(self, left=None, right=None) -> QueryBlocks:
        """Which blocks of queries a tile visits; the sides of the window are those that the config says there are."""
        self.check_sides(left, right)
        return QueryBlocks(self.tile_m, self.tile_n, self.causal, left, right)

    def lengths_obstacle(self, seqlen_q: int, seqlen_k: int) -> str | None:
        """Why the kernel cannot run with such lengths, or None."""
        if self.first_stores and self.causal and not self.varlen and seqlen_q > seqlen_k:
            return (
                f"first_stores with {seqlen_q} causal queries of {seqlen_k} keys: no tile visits the first ones; "
                "supported are up to as many queries as keys"
            )
        return None

    @property
    def tiles_found(self) -> bool:
        """The kernel before finds the tiles of all numbers: where they are handed out nobody else has registers for it."""
        return self.handed_out and self.varlen

    @property
    def visits_checked(self) -> bool:
        """Sums that no tile has stored must not be read: lengths say so on the GPU."""
        return self.first_stores and self.varlen

    @property
    def turns(self) -> bool:
        """Whether tiles wait for additions of others to dQ."""
        return self.ordered or self.first_stores

    @property
    def least_heads(self) -> int:
        """Heads of a section of a sequence, if it has so many: those of different lengths fill each other's gaps."""
        if self.tiles_found:
            return HANDED_SECTION_HEADS
        return UNEVEN_SECTION_HEADS if self.causal or self.ordered else 1

    @property
    def counts_workers(self) -> bool:
        """Whether the launch is told how many CTAs run at the same time."""
        return self.handed_out

    @property
    def numbers(self) -> tuple[str, ...]:
        """Numbers that the launch takes, in order.

        ``scale`` is the factor of a score, ``cap_scale`` that within the cap, ``workers`` the CTAs to launch at most.
        """
        given = {
            "cap": self.softcap,
            "cap_scale": self.softcap,
            "left": self.left,
            "right": self.right,
            "workers": self.counts_workers,
        }
        return ("scale", *_present(given))

    @property
    def optional_tensors(self) -> tuple[str, ...]:
        """Tensors that the launch takes after dk and dv, in order."""
        given = {"alibi_slopes": self.alibi, "turns": self.turns, "next_tile": self.handed_out}
        given[FOUND_TILES] = self.tiles_found
        return (*_present(given | self._lengths()), *self._aux())

    @property
    def given_tensors(self) -> tuple[str, ...]:
        """Those of them that are not part of the workspace."""
        return tuple(name for name in self.optional_tensors if name not in WORDS)

    def workspace(self, blocks, tiles) -> dict[str, tuple]:
        """(first, count) of what a backward needs for itself, by name, in numbers of 4 bytes of one allocation; dual-mode.

        Args:
            blocks: of queries, of all heads and batch entries.
            tiles: of keys, of all KV heads and batch entries; those that are found before have words here.
        """
        rows = blocks * self.tile_m
        sizes = {"sums": rows * self.dq_width, "lse": rows, "delta": rows}
        if self.tiles_found:
            sizes[FOUND_TILES] = tiles * self.tile_slots[0]
        if self.handed_out:
            sizes["next_tile"] = LINE
        if self.turns:
            sizes["turns"] = 2 * blocks
        places, first = {}, 0
        for name, size in sizes.items():
            places[name] = (first, size)
            first = first + size
        return places

    def workspace_numbers(self, blocks, tiles) -> int:
        """How many that are; ``blocks`` and ``tiles`` as there."""
        return sum(size for _, size in self.workspace(blocks, tiles).values())
