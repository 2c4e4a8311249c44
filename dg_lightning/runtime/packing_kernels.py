"""Triton kernels that decide which blocks are open and assign a row to each open pair.

The open (sample, block) pairs are packed, one row per pair, block by block. The rows of each block
are padded to a multiple of `ROWS`, so that a tile of rows belongs to one block. Kernels read the
number of rows on the device, without synchronization. Triton's interpreter tests them on a CPU.
"""

import triton
import triton.language as tl


@triton.jit
def decide(
    x,
    weight,
    bias,
    temperature,
    threshold,
    probability,
    gate,
    counts,
    samples,
    blocks,
    x_stride,
    HAS_BIAS: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute p and the hard gate of a tile of samples, and count the open ones of each block.

    The float32 weight is split into two half-precision parts, which keeps at least 16 bits of its
    mantissa; sums are in float32.
    """
    tile = tl.program_id(0)
    n = tile * TILE + tl.arange(0, TILE)
    b = tl.arange(0, WIDTH)
    k = tl.arange(0, DEPTH)
    z = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, INNER, DEPTH):
        inside = start + k < INNER
        h = tl.load(
            x + n[:, None].to(tl.int64) * x_stride + start + k[None, :],
            mask=(n < samples)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + b[None, :] * INNER + start + k[:, None],
            mask=(b < blocks)[None, :] & inside[:, None],
            other=0.0,
        )
        rounded = w.to(h.dtype)
        z = tl.dot(h, rounded, z)
        z = tl.dot(h, (w - rounded.to(tl.float32)).to(h.dtype), z)
    if HAS_BIAS:
        z += tl.load(bias + b, mask=b < blocks, other=0.0)[None, :]
    p = tl.sigmoid(z / tl.load(temperature))
    inside = (n < samples)[:, None] & (b < blocks)[None, :]
    is_open = (p > tl.load(threshold)) & inside
    pair = n[:, None] * blocks + b[None, :]
    tl.store(probability + pair, p, mask=inside)
    tl.store(gate + pair, is_open.to(tl.float32), mask=inside)
    tl.store(counts + tile * blocks + b, tl.sum(is_open.to(tl.int32), 0), mask=b < blocks)


@triton.jit
def count_open(gate, counts, samples, blocks, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Count the samples of a tile that open each block."""
    tile = tl.program_id(0)
    n = tile * TILE + tl.arange(0, TILE)
    b = tl.arange(0, WIDTH)
    inside = (n[:, None] < samples) & (b[None, :] < blocks)
    g = tl.load(gate + n[:, None] * blocks + b[None, :], mask=inside, other=0)
    tl.store(counts + tile * blocks + b, tl.sum((g != 0).to(tl.int32), 0), mask=b < blocks)


@triton.jit
def assign_rows(
    counts,
    ends,
    sample,
    tiles,
    blocks,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Replace counts by the first row of each tile of samples; mark padding rows with -1.

    Runs as one program, because there are few counts. `TILES` is at least `tiles`.
    """
    b = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)
    for start in range(0, TILES, CHUNK):
        t = start + tl.arange(0, CHUNK)
        inside = (t[:, None] < tiles) & (b[None, :] < blocks)
        total += tl.sum(tl.load(counts + t[:, None] * blocks + b[None, :], mask=inside, other=0), 0)
    padded = (total + ROWS - 1) // ROWS * ROWS
    end = tl.cumsum(padded, 0)
    tl.store(ends + b, end, mask=b < blocks)
    first = end - padded
    for start in range(0, ROWS, CHUNK):
        row = (first + total)[:, None] + start + tl.arange(0, CHUNK)[None, :]
        tl.store(sample + row, tl.full([WIDTH, CHUNK], -1, tl.int32), mask=row < end[:, None])
    for start in range(0, TILES, CHUNK):
        t = start + tl.arange(0, CHUNK)
        inside = (t[:, None] < tiles) & (b[None, :] < blocks)
        place = counts + t[:, None] * blocks + b[None, :]
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, tl.cumsum(count, 0) - count + first[None, :], mask=inside)
        first += tl.sum(count, 0)


@triton.jit
def place_pairs(
    gate, firsts, position, sample, samples, blocks, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the row of each open pair, and the sample of each row."""
    tile = tl.program_id(0)
    n = tile * TILE + tl.arange(0, TILE)
    b = tl.arange(0, WIDTH)
    inside = (n[:, None] < samples) & (b[None, :] < blocks)
    pair = n[:, None] * blocks + b[None, :]
    is_open = (tl.load(gate + pair, mask=inside, other=0) != 0).to(tl.int32)
    first = tl.load(firsts + tile * blocks + b, mask=b < blocks, other=0)
    row = first[None, :] + tl.cumsum(is_open, 0) - is_open
    tl.store(position + pair, tl.where(is_open != 0, row, -1), mask=inside)
    tl.store(sample + row, n[:, None] + tl.zeros_like(row), mask=inside & (is_open != 0))
