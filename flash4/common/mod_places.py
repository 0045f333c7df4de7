"""What a backward whose rows are keys knows of a step: what its mods are told, and a pair of query and key; in CuTe."""

from dataclasses import dataclass

from cutlass import Int32

from flash4.common.geometry import imax, imin
from flash4.common.mods import SeqlenInfo


@dataclass(frozen=True)
class ModPlace:
    """A step, by this thread's rows; its columns are queries ``8 j + {0, 1}`` from its first one on."""

    batch: object  # number of the sequence
    head: object
    keys: tuple  # of the rows; inside the sequence, as queries are: a mod may read a tensor there
    first_query: object  # of the first column
    info: SeqlenInfo

    @staticmethod
    def of(tiles, tile, head, first_query, keys):
        """That of a step of a tile, of a query head, from a first query on; ``keys`` may lie behind the last."""
        where, (seqlen_q, seqlen_k) = tiles.where(tile), tiles.lengths(tile)
        return ModPlace(
            batch=where.batch,
            head=head,
            keys=tuple(imax(imin(key, seqlen_k - 1), 0) for key in keys),
            first_query=first_query,
            info=SeqlenInfo(seqlen_q, seqlen_k, Int32(where.row_q), Int32(where.row_k)),
        )

    def at(self, r, j, aux):
        """Arguments of a mod behind the score, of row ``r`` and column ``j``."""
        query = self.first_query + (8 * (j // 2) + j % 2)
        query = imax(imin(query, self.info.seqlen_q - 1), 0)
        return self.batch, self.head, query, self.keys[r], self.info, aux


@dataclass(frozen=True)
class Pair:
    """What is known of a query and a key before dP is."""

    p: object
    score: object  # as a score_mod is given it
    slope: object  # of the cap, or None
    seen: object  # whether the query sees the key, or None if it surely does
