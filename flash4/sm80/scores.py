"""What is done to a block of scores before the softmax of the Ampere forward: caps, slopes, mods, masks, in CuTe."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash4.common import mods, numerics
from flash4.common.geometry import imax, imin
from flash4.common.mods import SeqlenInfo
from flash4.common.numerics import LOG2E


@dataclass(frozen=True)
class Scores:
    """Numbers that turn Q K^T into what softmax takes; None where the config has no such feature."""

    scale: Float32  # factor of a score, or of the tanh that caps it; in log2 units unless the config is natural
    cap_scale: object  # factor of a score within the cap
    scale_log2: Float32  # factor of what softmax takes
    inv_scale_log2: Float32
    sink: object  # (H,) float32
    slopes: object  # (B, H) float32
    aux: object  # tuple of tensors that mods read


@cute.jit
def mask_tail(ops, tile, i, S: cute.Tensor):
    """Mask a last block only if it reaches past the keys: without a causal mask most do not."""
    c = ops.config
    if (tile.first_block + tile.n_blocks - i) * c.tile_n > ops.tiles.lengths(tile)[1]:
        mask(ops, tile, i, S)


def prepare(ops, tile, i, S, masked):
    """Negate for a negative scale, or change scores, then mask."""
    c = ops.config
    if c.negate and not c.changes_scores:
        for r in range(2 * c.atoms):
            for j in range(c.tile_n // 4):
                S[r, j] = -S[r, j]
    if c.changes_scores:
        change(ops, tile, i, S)
    if c.score_mod or c.mask_mod:
        apply_mods(ops, tile, i, S)
    if masked and (c.causal or c.left or c.right):
        mask(ops, tile, i, S)
    elif masked:
        mask_tail(ops, tile, i, S)


def first_key(ops, tile, i):
    """First key that this thread has of a block; its columns are 8 j + {0, 1} from there."""
    first_block = tile.first_block + tile.n_blocks - 1 - i
    return first_block * ops.config.tile_n + 2 * (ops.lane % 4)


def mask(ops, tile, i, S):
    """Set scores before the row's first and past its last visible key to -inf."""
    c, blocks, lengths = ops.config, ops.tiles.blocks, ops.tiles.lengths(tile)
    first = first_key(ops, tile, i)
    for r in range(2 * c.atoms):
        query = ops.query(tile, r)
        visible = blocks.key_end(query, *lengths) - first
        hidden = blocks.key_begin(query, *lengths) - first
        for j in range(c.tile_n // 4):
            column = Int32(8 * (j // 2) + j % 2)
            seen = column < visible
            if c.left:
                seen = seen & (column >= hidden)
            S[r, j] = cutlass.select_(seen, S[r, j], -Float32.inf)


def change(ops, tile, i, S):
    """S = scale S, or its cap, less the slope times the distance; in log2 units unless the config is natural."""
    c, scores = ops.config, ops.scores
    place, (seqlen_q, seqlen_k) = ops.tiles.place(tile), ops.tiles.lengths(tile)
    for r in range(2 * c.atoms):
        distance = ops.query(tile, r) + seqlen_k - seqlen_q - first_key(ops, tile, i)
        if c.alibi:
            slope = scores.slopes[place.batch, ops.head(place, r)]
            slope = slope if c.natural else slope * LOG2E
        for j in range(c.tile_n // 4):
            s = S[r, j]
            if c.softcap:
                s = numerics.tanh(s * scores.cap_scale)
            s = s * scores.scale
            if c.alibi:
                column = 8 * (j // 2) + j % 2
                s = s - slope * cute.math.absf(Float32(distance - column))
            S[r, j] = s


def apply_mods(ops, tile, i, S):
    """S = score_mod(S), and -inf where mask_mod hides a key; see ``flash_attn_func`` for what they are given."""
    c, place = ops.config, ops.tiles.place(tile)
    score_mod, mask_mod = mods.function(c.score_mod), mods.function(c.mask_mod)
    seqlen_q, seqlen_k = ops.tiles.lengths(tile)
    info = SeqlenInfo(seqlen_q, seqlen_k, Int32(place.row_q), Int32(place.row_k))
    for r in range(2 * c.atoms):
        query = imax(imin(ops.query(tile, r), seqlen_q - 1), 0)  # a mod may read a tensor there
        for j in range(c.tile_n // 4):
            key = first_key(ops, tile, i) + (8 * (j // 2) + j % 2)
            key = imax(imin(key, seqlen_k - 1), 0)
            where = (place.batch, ops.head(place, r), query, key, info, ops.scores.aux)
            if score_mod is not None:
                S[r, j] = Float32(score_mod(S[r, j], *where))
            if mask_mod is not None:
                keep = Boolean(mask_mod(*where))
                S[r, j] = cutlass.select_(keep, S[r, j], -Float32.inf)
