"""The kernels of a Hopper backward in torch, by the facts that they have: stand-ins where there is no GPU."""

from dataclasses import astuple

import numpy as np
import torch

from flash4.common import mods
from flash4.common.dsl import plain
from flash4.common.fragments import dq_place
from flash4.common.geometry import QueryBlocks
from flash4.common.kv_sequences import SequenceSchedule, Side, find_tile
from flash4.common.kv_tiles import KvGrid
from flash4.common.mods import SeqlenInfo
from flash4.sim.bwd_sequences import to_rows, to_slots
from flash4.sim.handout import HostWarp


def check_rows(*tensors):
    """What TMA and vector loads ask of tensors."""
    for x in tensors:
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0, "TMA cannot address it"
        assert not any(stride % 8 for stride in x.stride()[:-1]), x.stride()


def width_of(config):
    """Head dims of the sums of dQ; ``config`` is that of a backward or of a kernel around it."""
    return getattr(config, "dq_width", config.tile_d)


def order_of_sums(config):
    """(queries, head dims) of a block's sums, one after the other."""
    places = [
        dq_place(config, part, thread, group, number)
        for part in range(2)
        for group in range(config.tile_m * width_of(config) // 1024)
        for thread in range(128)
        for number in range(4)
    ]
    assert sorted(places) == [
        (query, column) for query in range(config.tile_m) for column in range(width_of(config))
    ]
    return torch.tensor(places).T


def side_of(config, x, tile, cu=None, used=None):
    """Where sequences lie in x (B, S, H, D)."""
    cu, used = (None if t is None else t.tolist() for t in (cu, used))
    return Side(x.shape[0] if cu is None else len(cu) - 1, x.shape[1], tile, cu, used)


def queries_of(config, x, lengths):
    """Where queries lie, from the tensors of lengths that a small kernel takes."""
    assert len(lengths) == config.cu_q + config.used_q
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in lengths)
    cu, used = lengths[0] if config.cu_q else None, lengths[-1] if config.used_q else None
    return side_of(config, x, config.tile_m, cu, used)


def keys_of(config, k, *lengths):
    """Where keys lie, from k and the tensors of lengths that a small kernel takes."""
    assert len(lengths) == config.cu_k + config.used_k
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in lengths)
    cu, used = lengths[0] if config.cu_k else None, lengths[-1] if config.used_k else None
    return side_of(config, k, config.tile_n, cu, used)


def find(config, queries, heads, found, section, *rest):
    """Tiles of all numbers, into ``found``."""
    count = config.left + config.right
    sides, (k, *lengths) = list(rest[:count]), rest[count:]
    left, right = sides.pop(0) if config.left else None, sides.pop() if config.right else None
    blocks = QueryBlocks(config.tile_m, config.tile_n, config.causal, left, right)
    grid = KvGrid(0, k.shape[2], 0, heads // k.shape[2])
    schedule = SequenceSchedule(
        blocks, grid, queries, keys_of(config, k, *lengths), section, config.least_heads
    )
    assert len(found) == schedule.total
    for number, words in enumerate(found):
        tile = plain(find_tile)(schedule, HostWarp(), number)
        words.copy_(torch.tensor([*astuple(tile), *astuple(schedule.where(tile))]))


def prepare(config, tensors):
    """``passes.bwd_prepare`` in torch."""
    out, dout, lse, lse2, delta, sums, *optional = tensors
    check_rows(out, dout)
    n = config.cu_q + config.used_q
    lengths, optional = optional[:n], optional[n:]
    counters = config.turns + config.handed_out
    dlse, rest = optional[counters : counters + config.dlse], optional[counters + config.dlse :]
    if config.finds:
        find(config, queries_of(config, out, lengths), out.shape[2], *rest)
    else:
        assert not rest
    for counter in optional[:counters]:
        counter.zero_()
    d = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    d = d - dlse[0] if dlse else d
    seen, queries = lse != -torch.inf, queries_of(config, out, lengths)
    for statistic, x, fill in (
        (lse2, torch.where(seen, lse / 0.6931471805599453, torch.inf), np.inf),
        (delta, torch.where(seen, d, 0.0), 0),
    ):
        statistic.copy_(torch.from_numpy(to_slots(queries, x.numpy(), fill)))
    sums.fill_(0.0 if config.zeroes else torch.nan)


def multiply(config, tensors, numbers, section):
    """``sm90.bwd`` in torch, from the facts that the kernel has, one sequence after the other."""
    q, k, v, dout, lse2, delta, sums, dk, dv, *optional = tensors
    check_rows(q, k, v, dout, dk, dv)
    optional = dict(zip(config.optional_tensors, optional, strict=True))
    if config.handed_out:
        workers = dict(zip(config.numbers, numbers, strict=True))["workers"]
        assert not optional["next_tile"].any() and workers > 0
    if config.turns:
        assert not optional["turns"].any() and optional["turns"].shape == (*sums.shape[:3], 2)
    if config.tiles_found:
        places = optional["found_tiles"][:, :4]  # valid, sequence, tile, KV head
        assert len({*map(tuple, places[places[:, 0] > 0].tolist())}) == places[:, 0].sum() > 0
    queries, keys = (
        side_of(config, x, tile, optional.get(f"cu_seqlens_{n}"), optional.get(f"seqused_{n}"))
        for n, x, tile in (("q", q, config.tile_m), ("k", k, config.tile_n))
    )
    for ragged, xs in ((config.ragged_q, (q, dout)), (config.ragged_k, (k, v))):
        for x in xs if ragged else ():
            assert x.stride(1) and (x.shape[0] == 1 or x.stride(0) % x.stride(1) == 0)
    for index in range(keys.count):
        of_k = keys.at(index)
        of_q = queries.at(queries.number_of(of_k.batch))
        for x in (dk, dv):
            x[of_k.entry, of_k.begin : of_k.begin + of_k.stored] = 0
        if of_k.used and of_q.used:
            multiply_sequence(config, tensors, (of_q, of_k), numbers, optional)


def multiply_sequence(config, tensors, places, numbers, optional):
    """The products of one sequence."""
    q, k, v, dout, lse2, delta, sums, dk, dv, *_ = tensors
    numbers = dict(zip(config.numbers, numbers, strict=True))
    of_q, of_k = places
    ratio, seqlen_q, seqlen_k = q.shape[2] // k.shape[2], of_q.used, of_k.used

    def rows(x, of):
        return x[of.entry, of.begin : of.begin + of.used].float().transpose(0, 1)

    qs, dos = rows(q, of_q), rows(dout, of_q)
    ks, vs = (rows(x, of_k).repeat_interleave(ratio, 0) for x in (k, v))
    first = of_q.slot * config.tile_m
    lse, d = (x[of_q.entry, :, first : first + seqlen_q, None] for x in (lse2, delta))
    scores, slope = numbers["scale"] * qs @ ks.mT, 1.0
    if config.softcap:
        capped = torch.tanh(numbers["cap_scale"] * qs @ ks.mT)
        scores, slope = numbers["cap"] * capped, 1 - capped.square()
    distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
    if config.alibi:
        scores = scores - optional["alibi_slopes"][of_k.batch, :, None, None] * distance.abs()
    hidden = (distance < 0) & config.causal
    head, query, key = (torch.arange(n) for n in (q.shape[2], seqlen_q, seqlen_k))
    info = SeqlenInfo(seqlen_q, seqlen_k, of_q.begin * config.cu_q, of_k.begin * config.cu_k)
    aux = [optional[name] for name in config.optional_tensors if name.startswith(mods.AUX)]
    where = (of_k.batch, head[:, None, None], query[:, None], key, info, aux)
    score_mod, score_mod_bwd, mask_mod = (
        mods.function(key) for key in (config.score_mod, config.score_mod_bwd, config.mask_mod)
    )
    before = scores
    if score_mod is not None:
        scores = score_mod(scores, *where)
    if mask_mod is not None:
        hidden = hidden | ~torch.as_tensor(mask_mod(*where))
    if config.left:
        hidden = hidden | (distance > numbers["left"])
    if config.right:
        hidden = hidden | (-distance > numbers["right"])
    p = (scores - lse * 0.6931471805599453).masked_fill(hidden, -torch.inf).exp()
    ds = p * (dos @ vs.mT - d)
    if score_mod_bwd is not None:
        ds = score_mod_bwd(ds, before, *where).masked_fill(hidden | lse.isinf(), 0.0)
    ds = ds * slope
    for target, x, factor in ((dk, ds.mT @ qs, numbers["scale"]), (dv, p.mT @ dos, 1.0)):
        by_head = (factor * x).unflatten(0, (-1, ratio)).sum(1).transpose(0, 1)
        target[of_k.entry, of_k.begin : of_k.begin + seqlen_k] = by_head
    blocks = -(-seqlen_q // config.tile_m)
    padded = torch.zeros(sums.shape[1], blocks * config.tile_m, width_of(config))
    padded[:, :seqlen_q, : q.shape[3]] = ds @ ks
    at_queries, at_columns = order_of_sums(config)
    mine = sums[of_q.entry, :, of_q.slot : of_q.slot + blocks]
    parts = padded.unflatten(1, (-1, config.tile_m))[:, :, at_queries, at_columns]
    mine.copy_(parts if config.first_stores else mine + parts)
    if config.visits_checked and config.causal:  # what no tile visits nobody stores
        mine[:, : max(seqlen_q - seqlen_k, 0) // config.tile_m] = torch.nan


def finish(config, tensors, scale):
    """``passes.bwd_finish`` in torch."""
    sums, dq, *lengths = tensors
    check_rows(dq)
    n, visits = config.cu_q + config.used_q, None
    if config.checks:
        blocks = QueryBlocks(config.tile_m, config.tile_n, config.causal)
        visits = (blocks, keys_of(config, *lengths[n:]))
        lengths = lengths[:n]
    queries, columns = order_of_sums(config)
    rows = torch.empty(*sums.shape[:3], config.tile_m, config.tile_d)
    rows[:, :, :, queries, columns] = scale * sums
    found = np.full(dq.shape, np.nan, np.float32)
    to_rows(queries_of(config, dq, lengths), rows.flatten(2, 3).numpy(), found, visits)
    dq.copy_(torch.from_numpy(found))
