"""Where an accumulator's numbers lie, and where a dQ that is summed in that order has them (dual-mode, see ``geometry``).

A warpgroup's accumulator of 64 rows is groups of 8 columns; of each, a thread has 4 numbers, which are stored together.
"""

WARP_ROWS = 16
GROUP_COLUMNS = 8
GROUP_NUMBERS = 4  # of one thread


def accumulator_place(thread, group, number):
    """(row, column) of number ``number`` that ``thread`` of the warpgroup has of a group."""
    lane = thread % 32
    row = thread // 32 * WARP_ROWS + lane // 4 + number // 2 * 8
    return row, group * GROUP_COLUMNS + lane % 4 * 2 + number % 2


def dq_place(config, part, thread, group, number):
    """(query, head dim) in a block of dQ of a number of warpgroup ``part``; ``config`` is a ``FinishConfig`` or that of the backward."""
    if config.dq_lanes:
        return _lane_place(config, part, thread, group * GROUP_NUMBERS + number)
    if config.dq_turned:
        return _turned_place(config, part, thread, group, number)
    row, column = accumulator_place(thread, group, number)
    if config.swap_dq:
        beyond = (
            group - config.tile_m // GROUP_COLUMNS
        )  # of the third 64 head dims, which warpgroups share by queries
        if beyond >= 0:
            column -= config.tile_m - part * (config.tile_m // 2)
            return column, 128 + row
        return column, part * 64 + row
    if config.splits_queries:
        return part * 64 + row, column
    return row, part * (config.tile_d // 2) + column


def warp_dq_place(config, number):
    """(query, head dim) in a block of dQ of number ``number`` of its sums, where warps of 16 by 8 products made them.

    Numbers of all threads that come at once are neighbours. ``config`` is a ``FinishConfig`` or that of the Ampere backward.
    """
    thread, mine = number % (32 * config.warps), number // (32 * config.warps)
    lane, warp = thread % 32, thread // 32
    columns = config.tile_d * config.query_warps // config.warps
    groups = columns // GROUP_COLUMNS
    group = mine // GROUP_NUMBERS
    row = warp % config.query_warps * (config.tile_m // config.query_warps)
    row = row + group // groups * WARP_ROWS + mine % GROUP_NUMBERS // 2 * 8 + lane // 4
    column = warp // config.query_warps * columns + group % groups * GROUP_COLUMNS
    return row, column + lane % 4 * 2 + mine % 2


def _lane_place(config, part, thread, column):
    """The same of sums as lanes of tensor memory have them: of one CTA, a query each, half of the head dims a part; or of a
    pair, 64 queries a CTA, with the second half of the head dims in lanes from 64 on."""
    half = config.tile_d // 2
    if config.dq_lanes == 1:
        return thread, part * half + column
    return part * 64 + thread % 64, thread // 64 * half + column


def _turned_place(config, part, thread, group, number):
    """The same of sums as lanes have the transpose of dQ: a head dim a lane, 128 of them and then those that are left, up to
    256; of each such part four queries together."""
    lanes = 128
    at = part * (config.tile_m * config.tile_d // 2) + (group * lanes + thread) * GROUP_NUMBERS
    which = at // (lanes * config.tile_m)
    place = (at - which * (lanes * config.tile_m)) // GROUP_NUMBERS
    if config.tile_d % lanes:
        lanes = lanes - which * (2 * lanes - config.tile_d)
    queries = place // lanes
    return queries * GROUP_NUMBERS + number, which * 128 + place - queries * lanes
