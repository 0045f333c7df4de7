"""Arguments of launches, the same on every architecture: without data, for compiling; and what is made of those given."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from flash4.common.kv_one_tile import TILE_WORDS
from flash4.common.kv_sequences import Side
from flash4.common.launch_facts import FOUND_TILES, LENGTHS
from flash4.common.mods import AUX, decode_aux
from flash4.common.tma_views import rows_of_entry
from flash4.common.varlen import Sequences

AUX_ELEMENTS = (Float32, Float16, BFloat16, Int32, Int64)  # in the order of mods.AUX_DTYPES
COUNTERS = ("next_tile", "reset_counter", "redone")  # one int32 each
TURNS = 2  # of a block of dQ: warpgroups, or halves of it, that add to it
INTEGERS = ("left", "right", "workers")  # among the numbers of a launch


def _sym(divisibility=1):
    return cute.sym_int64(divisibility=divisibility)


def _fake(dtype, shape, divisibility, align):
    """A tensor whose last mode is contiguous, and whose other strides have a divisor."""
    strides = (*(_sym(divisibility) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride=strides, assumed_align=align)


def _vector(dtype, *shape):
    return _fake(dtype, shape, 1, 4)


def fake_aux(dtype_index, dims):
    """A tensor that mods read: any sizes and strides."""
    dtype = AUX_ELEMENTS[dtype_index]
    return cute.runtime.make_fake_tensor(
        dtype,
        tuple(cute.sym_int() for _ in range(dims)),
        stride=tuple(cute.sym_int64() for _ in range(dims)),
        assumed_align=dtype.width // 8,
    )


class _Sizes:
    """Symbolic sizes of a call, and its tensors in 16 bit."""

    def __init__(self, config, element):
        self._element = element
        self.batch, self.heads, self.heads_kv = (cute.sym_int() for _ in range(3))
        # Packed sequences are a batch of one.
        self.batch_k = self.batch if config.cu_q == config.cu_k else cute.sym_int()
        self.seqlen_q, self.seqlen_k = cute.sym_int(), cute.sym_int()
        self.head_dim, self.head_dim_v = (cute.sym_int(divisibility=8) for _ in range(2))

    def rows(self, *shape):
        """(B, S, H, D) in 16 bit: TMA, like cp.async, takes multiples of 16 bytes."""
        return _fake(self._element, shape, 8, 16)

    def of_queries(self, head_dim):
        """As q, with a head dim."""
        return self.rows(self.batch, self.seqlen_q, self.heads, head_dim)

    def of_keys(self, head_dim):
        """As k."""
        return self.rows(self.batch_k, self.seqlen_k, self.heads_kv, head_dim)


def _arguments(config, names, tensors, optional, ints: int):
    """Tensors, those of these names among them, numbers and so many more int32 as a launch takes them."""
    optional |= {name: _vector(Int32, cute.sym_int()) for name in LENGTHS}
    optional |= {name: _vector(Int32, 1) for name in COUNTERS}
    optional |= {f"{AUX}{i}": fake_aux(*kind) for i, kind in enumerate(decode_aux(config.aux))}
    tensors += tuple(optional[name] for name in names)
    numbers = tuple(Int32(1) if name in INTEGERS else Float32(1) for name in config.numbers)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return (tensors, numbers, *(Int32(1) for _ in range(ints)), stream)


def fake_forward(config, element):
    """Arguments of a forward, with symbolic sizes and strides: (tensors, numbers, section, workers, stream)."""
    sizes = _Sizes(config, element)
    tensors = (
        sizes.of_queries(sizes.head_dim),
        sizes.of_keys(sizes.head_dim),
        sizes.of_keys(sizes.head_dim_v),
        sizes.of_queries(sizes.head_dim_v),
        _vector(Float32, sizes.batch, sizes.heads, sizes.seqlen_q),
    )
    optional = {
        "sink": _vector(Float32, sizes.heads),
        "alibi_slopes": _vector(Float32, cute.sym_int(), sizes.heads),
    }
    return _arguments(config, config.optional_tensors, tensors, optional, 2)


def fake_backward(config, element):
    """Arguments of a backward, with symbolic sizes and strides: (tensors, numbers, section, stream)."""
    sizes, padded, blocks = _Sizes(config, element), cute.sym_int(), cute.sym_int()

    def floats(*shape):
        return _fake(Float32, shape, 4, 16)  # bulk copies: multiples of 16 bytes

    tensors = (
        sizes.of_queries(sizes.head_dim),
        sizes.of_keys(sizes.head_dim),
        sizes.of_keys(sizes.head_dim_v),
        sizes.of_queries(sizes.head_dim_v),
        floats(sizes.batch, sizes.heads, padded),
        floats(sizes.batch, sizes.heads, padded),
        floats(sizes.batch, sizes.heads, blocks, config.tile_m * config.dq_width),
        sizes.of_keys(sizes.head_dim),
        sizes.of_keys(sizes.head_dim_v),
    )
    optional = {
        "alibi_slopes": _vector(Float32, cute.sym_int(), sizes.heads),
        "turns": _vector(Int32, sizes.batch, sizes.heads, blocks, TURNS),
        FOUND_TILES: _fake(Int32, (cute.sym_int(), TILE_WORDS), 4, 16),
    }
    return _arguments(config, config.optional_tensors, tensors, optional, 1)


def fake_whole_backward(config, element, dlse: bool):
    """Arguments of a whole backward, with symbolic sizes and strides: (tensors, numbers, section, stream)."""
    sizes = _Sizes(config, element)
    rows = (sizes.batch, sizes.heads, sizes.seqlen_q)
    tensors = (
        sizes.of_queries(sizes.head_dim),
        sizes.of_keys(sizes.head_dim),
        sizes.of_keys(sizes.head_dim_v),
        sizes.of_queries(sizes.head_dim_v),
        sizes.of_queries(sizes.head_dim_v),
        _vector(Float32, *rows),
        sizes.of_queries(sizes.head_dim),
        sizes.of_keys(sizes.head_dim),
        sizes.of_keys(sizes.head_dim_v),
        cute.runtime.make_fake_tensor(Float32, (_sym(),), stride=(1,), assumed_align=16),
    )
    optional = {"alibi_slopes": _vector(Float32, cute.sym_int(), sizes.heads)}
    tensors, *rest = _arguments(config, config.given_tensors, tensors, optional, 1)
    if dlse:
        strides = (_sym(), _sym(), _sym())
        fake = cute.runtime.make_fake_tensor(Float32, rows, stride=strides, assumed_align=4)
        tensors += (fake,)
    return (tensors, *rest)


def aux_of(optional: dict):
    """Tensors that mods read, among those of a launch by name; None if there are none."""
    found = tuple(x for name, x in optional.items() if name.startswith(AUX))
    return found if found else None


def sequences_of(q, k, optional: dict) -> Sequences:
    """Sequences of a forward whose lengths are in tensors."""
    cu_q, cu_k, used_q, used_k = (optional.get(name) for name in LENGTHS)
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    return Sequences(batch, q.shape[1], k.shape[1], cu_q, cu_k, used_q, used_k)


def sides_of(config, q, k, optional: dict) -> tuple[Side, Side]:
    """Where queries and keys of the sequences of a backward lie, whose lengths are in tensors."""
    cu_q, cu_k, used_q, used_k = (optional.get(name) for name in LENGTHS)
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    return (
        Side(batch, q.shape[1], config.tile_m, cu_q, used_q),
        Side(batch, k.shape[1], config.tile_n, cu_k, used_k),
    )


def entry_rows(config, q, k, v, do) -> dict:
    """Rows from one batch entry to the next, by name of what is ragged but not packed."""
    found = {}
    if config.used_q and not config.cu_q:
        found |= {"q": rows_of_entry(q), "do": rows_of_entry(do)}
    if config.used_k and not config.cu_k:
        found |= {"k": rows_of_entry(k), "v": rows_of_entry(v)}
    return found
