"""What is done to a block of scores before the softmax, in NumPy; ``call`` is as in ``sm90_fwd``."""

import numpy as np

from flash4.common import mods
from flash4.common.mods import SeqlenInfo


def change(call, tile, rows, keys, s):
    """S = scale S, or its cap, less ALiBi's slope |p - j|, if the config changes scores."""
    c = call.config
    if not c.changes_scores:
        return
    if c.softcap:
        s[:] = np.tanh(s * call.scale)
    s *= call.changed_scale
    if c.alibi:
        seqlen_q, seqlen_k = call.tiles.lengths(tile)
        query, head, _ = call.places(tile, rows)
        slopes = call.options.alibi_slopes[call.tiles.place(tile).batch]
        slope = slopes[np.minimum(head, len(slopes) - 1), None] * call.unit
        s -= slope * np.abs(query[:, None] + seqlen_k - seqlen_q - keys).astype(np.float32)


def apply_mods(call, tile, rows, keys, s):
    """S = score_mod(S), and -inf where mask_mod hides a key."""
    c = call.config
    if not (c.score_mod or c.mask_mod):
        return
    place, lengths = call.tiles.place(tile), call.tiles.lengths(tile)
    query, head, _ = call.places(tile, rows)
    query, keys = (
        np.clip(x, 0, max(n - 1, 0)) for x, n in ((query, lengths[0]), (keys, lengths[1]))
    )
    info = SeqlenInfo(*lengths, place.row_q, place.row_k)
    head = np.minimum(head, call.q.shape[2] - 1)[:, None]
    where = (place.batch, head, query[:, None], keys, info, call.options.aux_tensors)
    if c.score_mod:
        s[:] = mods.function(c.score_mod)(s, *where)
    if c.mask_mod:
        s[~np.broadcast_to(mods.function(c.mask_mod)(*where), s.shape)] = -np.inf


def mask(call, tile, rows, keys, s):
    """-inf before the row's first and past its last visible key."""
    blocks, lengths = call.tiles.blocks, call.tiles.lengths(tile)
    queries = call.places(tile, rows)[0].tolist()
    begins, ends = (
        np.array([edge(query, *lengths) for query in queries])[:, None]
        for edge in (blocks.key_begin, blocks.key_end)
    )
    s[(keys < begins) | (keys >= ends)] = -np.inf
