"""Strides, offsets and sizes: each tensor strided alone, past 2^31 elements, more heads than a grid dimension holds."""

from __future__ import annotations

import math

import pytest
import torch

import flash4
from tests.checks import Guarded, assert_forward_close, guarded

DEVICE = "cuda"
BF16 = torch.bfloat16
Shape = tuple[int, int, int, int]


def compact(order: tuple[int, ...], extra: int = 0, steps: Shape = (1, 1, 1, 1), offset: int = 0):
    """Layout that is dense in an order of dimensions, outermost first.

    Args:
        order: dimensions from the outermost to the innermost.
        extra: elements between the rows of the innermost dimension.
        steps: every how many-th index of a dimension is used.
        offset: of the first element.
    """

    def layout(shape: Shape) -> tuple[tuple[int, ...], int]:
        stride, step = [0] * 4, 1
        for dim in reversed(order):
            stride[dim] = step * steps[dim]
            step = stride[dim] * shape[dim] + (extra if dim == order[-1] else 0)
        return tuple(stride), offset

    return layout


# Layout: shape -> (strides, offset of the first element).
IN_PLACE = {
    "contiguous": compact((0, 1, 2, 3)),
    "heads first": compact((0, 2, 1, 3)),
    "queries outermost": compact((1, 0, 2, 3)),
    "heads outermost": compact((2, 0, 1, 3)),
    "interleaved": compact((0, 1, 2, 3), steps=(1, 3, 1, 1), offset=2 * 3 * 72),
    "every second query": compact((0, 1, 2, 3), steps=(1, 2, 1, 1)),
    "every second head": compact((0, 1, 2, 3), steps=(1, 1, 2, 1)),
    "padded rows": compact((0, 1, 2, 3), extra=8, offset=8),
    "far apart": compact((0, 1, 2, 3), extra=1000, offset=16),
}
ONLY_INPUTS = {
    "one batch entry": lambda shape: ((0, shape[2] * shape[3], shape[3], 1), 0),
    "one head": lambda shape: ((shape[1] * shape[3], shape[3], 0, 1), 0),
    "one row": lambda shape: ((0, 0, 0, 1), 0),
    "overlapping rows": lambda shape: ((shape[1] * shape[3], 8, shape[3], 1), 0),
}
COPIED = {
    "offset of one element": compact((0, 1, 2, 3), offset=1),
    "offset of 8 bytes": compact((0, 1, 2, 3), offset=4),
    "odd rows": compact((0, 1, 2, 3), extra=1),
    "rows of 8 bytes more": compact((0, 1, 2, 3), extra=4),
    "every second element": compact((0, 1, 2, 3), steps=(1, 1, 1, 2)),
    "head_dim outermost": compact((3, 0, 1, 2)),
    "head_dim before heads": compact((0, 1, 3, 2)),
    "one element": lambda shape: ((0, 0, 0, 0), 0),
}
ALL_LAYOUTS = {**IN_PLACE, **ONLY_INPUTS, **COPIED}

SHAPES = {"q": (2, 150, 3, 72), "k": (2, 170, 3, 72), "v": (2, 170, 3, 40), "out": (2, 150, 3, 40)}


def tensor_of(shape: Shape, layout, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random tensor in a layout; what lies between its elements is NaN."""
    stride, offset = layout(shape)
    size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    storage = torch.full((size,), torch.nan, dtype=dtype, device=DEVICE)
    x = storage.as_strided(shape, stride, offset)
    own = [slice(None) if s else slice(1) for s in stride]
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x[tuple(own)] = torch.randn(x[tuple(own)].shape, generator=generator, device=DEVICE).to(dtype)
    return x


def guarded_in(shape: Shape, layout, dtype: torch.dtype = BF16) -> Guarded:
    """A guarded, NaN-filled buffer for out in a layout."""
    stride, offset = layout(shape)
    size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    flat = guarded((size,), dtype, DEVICE, rows=1)
    start = flat.tensor.storage_offset() + offset
    return Guarded(flat.buffer.as_strided(shape, stride, start), flat.buffer)


def inputs_with(name: str, layout) -> list[torch.Tensor]:
    """q, k and v, one of them in a layout, the others contiguous."""
    return [
        tensor_of(SHAPES[x], layout if x == name else IN_PLACE["contiguous"], seed)
        for seed, x in enumerate("qkv")
    ]


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_one_input_in_another_layout(layout: str, name: str):
    inputs = inputs_with(name, ALL_LAYOUTS[layout])
    copies = flash4.explain(*inputs, causal=True).copies
    assert [copy[0] for copy in copies] == ([name] if layout in COPIED else [])
    before = [x.clone() for x in inputs]
    out, lse = flash4.flash_attn_func(*inputs, causal=True, return_lse=True)
    assert_forward_close(out, lse, inputs, causal=True)
    contiguous = [x.contiguous() for x in inputs]
    assert torch.equal(out, flash4.flash_attn_func(*contiguous, causal=True))
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y), "an input was changed"


@pytest.mark.parametrize("layout", IN_PLACE)
def test_out_in_another_layout(layout: str):
    inputs = inputs_with("", None)
    buffer = guarded_in(SHAPES["out"], IN_PLACE[layout])
    out, lse = flash4.flash_attn_func(*inputs, causal=True, out=buffer.tensor, return_lse=True)
    buffer.check(written=True)
    assert out is buffer.tensor
    assert_forward_close(out, lse, inputs, causal=True)


@pytest.mark.parametrize("layout", {**COPIED, **ONLY_INPUTS})
def test_out_that_cannot_be_written_in_place(layout: str):
    buffer = guarded_in(SHAPES["out"], ALL_LAYOUTS[layout])
    with pytest.raises(ValueError, match="out"):
        flash4.flash_attn_func(*inputs_with("", None), out=buffer.tensor)
    assert buffer.tensor.isnan().all()


@pytest.mark.parametrize("layout", ["heads first", "interleaved", "one head", "odd rows"])
def test_all_tensors_in_one_layout_with_packed_heads(layout: str):
    """Heads that share a KV head are packed into tiles, which walk over two strides."""
    place = ALL_LAYOUTS[layout]
    shapes = ((2, 33, 10, 72), (2, 170, 2, 72), (2, 170, 2, 40))
    inputs = [tensor_of(shape, place, seed) for seed, shape in enumerate(shapes)]
    out, lse = flash4.flash_attn_func(*inputs, causal=True, return_lse=True, pack_gqa=True)
    assert_forward_close(out, lse, inputs, causal=True)


@pytest.mark.parametrize("stride", [0, 1, 3, 2**33 + 1, 2**45])
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_odd_strides_of_size_1_dimensions(dims: tuple[int, ...], stride: int):
    """The stride of a size-1 dimension means nothing, and may be anything."""

    def odd(x: torch.Tensor) -> torch.Tensor:
        strides = [stride if dim in dims else s for dim, s in enumerate(x.stride())]
        return x.as_strided(x.shape, strides)

    def shape(*sizes: int) -> Shape:
        return tuple(1 if dim in dims else n for dim, n in enumerate(sizes))

    contiguous = IN_PLACE["contiguous"]
    inputs = [
        tensor_of(shape(2, seqlen, 3, head_dim), contiguous, seed)
        for seed, (seqlen, head_dim) in enumerate(((50, 72), (70, 72), (70, 40)))
    ]
    strange = [odd(x) for x in inputs]
    assert not flash4.explain(*strange).copies
    expected, lse = flash4.flash_attn_func(*inputs, return_lse=True)
    assert_forward_close(expected, lse, inputs)
    assert torch.equal(flash4.flash_attn_func(*strange), expected)
    buffer = guarded_in(expected.shape, contiguous)
    flash4.flash_attn_func(*strange, out=odd(buffer.tensor))
    buffer.check(written=True)
    assert torch.equal(buffer.tensor, expected)
    misaligned = [odd(tensor_of(x.shape, COPIED["offset of one element"])) for x in inputs]
    for x, y in zip(misaligned, inputs, strict=True):
        x.copy_(y)
    assert torch.equal(flash4.flash_attn_func(*misaligned), expected)


def needs_memory(gib: float) -> None:
    """Skip where that much GPU memory is not free."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / 2**30:.0f} are free")


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_that_lead_past_2_to_31_elements(name: str, dim: int):
    """The last elements of one tensor lie beyond what 32 bits can count."""
    needs_memory(12)
    shape = SHAPES[name]
    far = -(-(2**31 + 2**20) // (shape[dim] - 1) // 8) * 8

    def layout(shape: Shape) -> tuple[tuple[int, ...], int]:
        (stride, offset) = IN_PLACE["contiguous"](shape)
        return tuple(far if i == dim else s for i, s in enumerate(stride)), offset

    inputs = inputs_with(name, layout)
    if name == "out":
        stride, _ = layout(shape)
        size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        out = torch.full((size,), torch.nan, dtype=BF16, device=DEVICE).as_strided(shape, stride)
    else:
        out = torch.full(SHAPES["out"], torch.nan, dtype=BF16, device=DEVICE)
    _, lse = flash4.flash_attn_func(*inputs, causal=True, out=out, return_lse=True)
    assert_forward_close(out, lse, inputs, causal=True)
    assert torch.equal(out, flash4.flash_attn_func(*(x.contiguous() for x in inputs), causal=True))


def check_parts(q, k, v, out, lse, dim: int, parts: list[slice]) -> None:
    """Compare parts of a large, not causal result with the reference on the same parts.

    Args:
        q: as the call had it, and so are k and v.
        k: see q.
        v: see q.
        out: result.
        lse: its LSE.
        dim: dimension of q that is cut, and of k and v too unless it is the queries'.
        parts: slices of that dimension.
    """
    for part in parts:
        cut = tuple(part if i == dim else slice(None) for i in range(4))
        inputs = (q[cut], *((k, v) if dim == 1 else (k[cut], v[cut])))
        cut_lse = tuple(cut[i] for i in (0, 2, 1))
        assert_forward_close(out[cut], lse[cut_lse], inputs)


def test_a_dense_tensor_of_more_than_2_to_31_elements():
    needs_memory(40)
    heads, seqlen = 16, 2**20 + 300
    assert heads * seqlen * 128 > 2**31
    q = torch.randn(1, seqlen, heads, 128, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(1, 100, heads, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    out, lse = flash4.flash_attn_func(q, k, v, return_lse=True)
    edge = 2**31 // (heads * 128)
    parts = [slice(0, 512), slice(edge - 256, seqlen)]
    check_parts(q, k, v, out, lse, 1, parts)


def test_keys_of_more_than_2_to_31_elements():
    needs_memory(40)
    heads, seqlen = 16, 2**20 + 300
    q = torch.randn(1, 2, heads, 128, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(1, seqlen, heads, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    k[:, -50:] *= 8  # so that the last keys count
    out, lse = flash4.flash_attn_func(q, k, v, return_lse=True)
    check_parts(q, k, v, out, lse, 2, [slice(i, i + 1) for i in range(heads)])


def test_packed_tensors_of_more_than_2_to_31_elements():
    """Sequences at the very end of packed tensors, behind a million rows of none."""
    needs_memory(60)
    heads, rows = 16, 2**20 + 300
    q, k, v = (torch.randn(rows, heads, 128, device=DEVICE, dtype=BF16) for _ in range(3))
    k[: rows - 400] = v[: rows - 400] = torch.nan
    cu = torch.tensor([rows - 400, rows - 150, rows], dtype=torch.int32, device=DEVICE)
    out, lse = flash4.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, return_lse=True)
    assert (out[: rows - 400] == 0).all() and (lse[:, : rows - 400] == -torch.inf).all()
    for part in (slice(rows - 400, rows - 150), slice(rows - 150, rows)):
        inputs = tuple(x[None, part] for x in (q, k, v))
        assert_forward_close(out[None, part], lse[None, :, part], inputs, causal=True)


def test_an_lse_of_more_than_2_to_31_elements():
    """Every batch entry and head sees the same, so that all of them can be compared with the first."""
    needs_memory(64)
    batch, heads, seqlen = 4, 128, 2**22 + 256
    assert batch * heads * seqlen > 2**31
    q = torch.randn(1, seqlen, 1, 8, device=DEVICE, dtype=BF16).expand(batch, seqlen, heads, 8)
    k, v = (
        torch.randn(1, 8, 1, 8, device=DEVICE, dtype=BF16).expand(batch, 8, heads, 8)
        for _ in range(2)
    )
    out, lse = flash4.flash_attn_func(q, k, v, return_lse=True)
    for b in range(batch):
        for h in range(heads):
            assert torch.equal(lse[b, h], lse[0, 0]) and torch.equal(out[b, :, h], out[0, :, 0])
    one = slice(0, 1)
    for part in (slice(0, 512), slice(seqlen - 512, seqlen)):
        inputs = (q[one, part, one], k[one, :, one], v[one, :, one])
        assert_forward_close(out[one, part, one], lse[one, one, part], inputs)


MANY = 65_536 + 300
MANY_SHAPES = {
    "batch": ((MANY, 4, 1, 64), (MANY, 5, 1, 64)),
    "heads": ((1, 4, MANY, 64), (1, 5, MANY, 64)),
    "batch times heads": ((300, 4, 300, 64), (300, 5, 300, 64)),
    "heads of one KV head": ((1, 4, MANY, 64), (1, 5, 1, 64)),
    "KV heads, packed": ((1, 4, 2 * MANY, 64), (1, 5, MANY, 64)),
    "query tiles": ((1, 65_536 * 256 + 3, 1, 8), (1, 9, 1, 8)),
    "odd query tiles": ((1, 64 * 65_535 + 1, 1, 64), (1, 65, 1, 64)),
    "key blocks": ((1, 3, 1, 64), (1, 65_536 * 128 + 3, 1, 64)),
}


@pytest.mark.parametrize("what", MANY_SHAPES)
def test_more_than_a_grid_dimension_holds(what: str):
    q_shape, kv_shape = MANY_SHAPES[what]
    needs_memory(1 + 40 * sum(math.prod(x) for x in (q_shape, kv_shape)) * 2 / 2**30)
    q = torch.randn(q_shape, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(kv_shape, device=DEVICE, dtype=BF16) for _ in range(2))
    out = torch.full_like(q, torch.nan)
    _, lse = flash4.flash_attn_func(q, k, v, out=out, return_lse=True)
    assert not out.isnan().any()
    if q_shape[1] > 4096:
        step = 1 << 18
        starts = range(0, q_shape[1], step)
        check_parts(q, k, v, out, lse, 1, [slice(i, i + step) for i in starts])
    else:
        assert_forward_close(out, lse, (q, k, v))
