"""Triton kernels of block-gated execution: decisions, where each open block goes, products, sums.

The open (sample, block) pairs are packed: one row a pair, block by block, each block's rows padded
to a multiple of `ROWS`, so that a tile of rows belongs to one block. Kernels read on the device how
many rows there are: nothing here waits for it. Without a GPU, Triton's interpreter tests them.
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
    BIASED: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute p and the hard gate of a tile of samples, and count the open ones of each block.

    The weight, in float32, is split into two parts in the half precision of x: 16 bits or more of
    its mantissa count, and sums are in float32.
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
    if BIASED:
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
def lay_out(
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
    """Turn counts into the first row of each tile of samples; the padding has no sample.

    One program: the counts are few. `TILES` is at least `tiles`.
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
    """Give each open pair its row; note the row by pair, and the sample by row."""
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


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.maximum(z, 0.0)
    if ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    if ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    if ACTIVATION == "tanh":
        return 2.0 * tl.sigmoid(2.0 * z) - 1.0
    return z


@triton.jit
def _slope(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(z > 0.0, 1.0, 0.0)
    if ACTIVATION == "gelu":
        normal = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * normal
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    t = 2.0 * tl.sigmoid(2.0 * z) - 1.0
    return 1.0 - t * t


@triton.jit
def product(
    x,
    sample,
    ends,
    weight,
    bias,
    raw,
    out,
    blocks,
    width,
    x_stride,
    weight_of_block,
    weight_of_output,
    weight_of_input,
    GATHERS: tl.constexpr,
    BIASED: tl.constexpr,
    KEEPS_RAW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BY_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply tiles of rows with the weights of their block: ``act(x Wᵀ + b)``.

    As many programs as the device runs at a time share the tiles, whose number only it knows.
    """
    b = tl.arange(0, BLOCKS)
    end = tl.load(ends + b, mask=b < blocks, other=2147483647)
    tiles = tl.load(ends + blocks - 1) // ROWS
    across = tl.cdiv(width, COLUMNS)
    # Flattened: the loads of the next tile begin while the last one is still being written.
    for job in tl.range(tl.program_id(0), tiles * across, tl.num_programs(0), flatten=True):
        # Programs that run at the same time share rows and weights: strips of a few tiles.
        strip = job // (STRIP * across)
        within = job % (STRIP * across)
        height = tl.minimum(tiles - strip * STRIP, STRIP)
        tile = strip * STRIP + within % height
        column = within // height
        block = tl.sum((end <= tile * ROWS).to(tl.int32), 0)
        r = tile * ROWS + tl.arange(0, ROWS)
        # A row of padding takes some sample: nobody reads what becomes of it.
        source = tl.maximum(tl.load(sample + r), 0) if GATHERS else r
        n = column * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        inputs = x + source[:, None].to(tl.int64) * x_stride + k[None, :]
        if not DESCRIBED:
            weights = weight + block.to(tl.int64) * weight_of_block
            weights += n[None, :].to(tl.int64) * weight_of_output
            weights += k[:, None].to(tl.int64) * weight_of_input
        z = tl.zeros([ROWS, COLUMNS], WIDE)
        for start in range(0, INNER, DEPTH):
            if EVEN:
                a = tl.load(inputs)
            else:
                a = tl.load(inputs, mask=start + k[None, :] < INNER, other=0.0)
            if DESCRIBED:
                # A matrix (outputs, inputs), of which a block has rows or columns.
                if BY_ROWS:
                    w = weight.load([block * width + column * COLUMNS, start]).T
                else:
                    w = weight.load([column * COLUMNS, block * INNER + start]).T
            else:
                if EVEN:
                    w = tl.load(weights)
                else:
                    valid = (start + k[:, None] < INNER) & (n[None, :] < width)
                    w = tl.load(weights, mask=valid, other=0.0)
                weights += DEPTH * weight_of_input
            z = tl.dot(a, w, z, input_precision="ieee", out_dtype=WIDE)
            inputs += DEPTH
        if BIASED:
            z += tl.load(bias + block * width + n, mask=n < width, other=0.0).to(WIDE)[None, :]
        entry = r[:, None].to(tl.int64) * width + n[None, :]
        inside = (n < width)[None, :]
        if KEEPS_RAW:
            z = z.to(raw.dtype.element_ty)
            tl.store(raw + entry, z, mask=inside)
            z = z.to(WIDE)
        tl.store(out + entry, _activated(z, ACTIVATION).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gather(x, sample, ends, out, blocks, width, x_stride, COLUMNS: tl.constexpr):
    """Copy the sample of each row; padding becomes 0."""
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.load(ends + blocks - 1)
    row = tl.program_id(0)
    while row < rows:
        source = tl.load(sample + row)
        taken = x + tl.maximum(source, 0).to(tl.int64) * x_stride + n
        values = tl.load(taken, mask=(n < width) & (source >= 0), other=0.0)
        tl.store(out + row.to(tl.int64) * width + n, values, mask=n < width)
        row += tl.num_programs(0)


@triton.jit
def activation_backward(
    of_hidden,
    raw,
    ends,
    of_row,
    blocks,
    ACTIVATION: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take a gradient back through the activation, in place.

    With `SUMS`, add up what a row's hidden units and their gradients have in common: the gradient
    of a gate that is 1 there.
    """
    rows = tl.load(ends + blocks - 1)
    row = tl.program_id(0)
    while row < rows:
        total = 0.0
        for start in range(0, WIDTH, COLUMNS):
            n = start + tl.arange(0, COLUMNS)
            place = row.to(tl.int64) * WIDTH + n
            gradient = tl.load(of_hidden + place, mask=n < WIDTH, other=0.0).to(WIDE)
            z = tl.load(raw + place, mask=n < WIDTH, other=0.0).to(WIDE)
            if SUMS:
                total += tl.sum(gradient * _activated(z, ACTIVATION), 0)
            gradient *= _slope(z, ACTIVATION)
            tl.store(of_hidden + place, gradient.to(of_hidden.dtype.element_ty), mask=n < WIDTH)
        if SUMS:
            tl.store(of_row + row, total)
        row += tl.num_programs(0)


@triton.jit
def sum_of_blocks(
    packed, ends, out, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """Add up the rows of each block; each of some programs adds up a part of them."""
    block = tl.program_id(0)
    part = tl.program_id(2)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(ends + block - 1, mask=block > 0, other=0) + part * ROWS
    end = tl.load(ends + block)
    total = tl.zeros([COLUMNS], WIDE)
    while row < end:
        r = row + tl.arange(0, ROWS)
        place = packed + r[:, None].to(tl.int64) * width + n[None, :]
        total += tl.sum(tl.load(place, mask=(n < width)[None, :], other=0.0).to(WIDE), 0)
        row += ROWS * tl.num_programs(2)
    place = (part * tl.num_programs(0) + block) * width + n
    tl.store(out + place, total.to(out.dtype.element_ty), mask=n < width)


@triton.jit
def sum_of_samples(
    packed,
    position,
    bias,
    out,
    width,
    BIASED: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add up the rows of each sample, and the bias."""
    sample = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], WIDE)
    if BIASED:
        total += tl.load(bias + n, mask=n < width, other=0.0).to(WIDE)
    for b in range(0, BLOCKS):
        row = tl.load(position + sample * BLOCKS + b)
        if row >= 0:
            total += tl.load(packed + row.to(tl.int64) * width + n, mask=n < width).to(WIDE)
    tl.store(out + sample.to(tl.int64) * width + n, total.to(out.dtype.element_ty), mask=n < width)
