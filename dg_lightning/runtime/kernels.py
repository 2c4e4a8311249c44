"""Triton kernels that compute on the packed rows of `triton_engine.Packing`."""

import triton
import triton.language as tl


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
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
def _activation_grad(z, ACTIVATION: tl.constexpr):
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
    gate,
    value,
    out,
    blocks,
    width,
    x_stride,
    weight_block_stride,
    weight_output_stride,
    weight_input_stride,
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    USES_DESCRIPTOR: tl.constexpr,
    BY_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Multiply each tile of rows by its block's weights: ``g act(x Wᵀ + b) value``.

    Persistent programs share the tiles, because only the device knows how many there are.
    """
    b = tl.arange(0, BLOCKS)
    end = tl.load(ends + b, mask=b < blocks, other=2147483647)
    tiles = tl.load(ends + blocks - 1) // ROWS
    across = tl.cdiv(width, COLUMNS)
    # Flattened, so that loads of the next tile overlap with stores of the current one.
    for job in tl.range(tl.program_id(0), tiles * across, tl.num_programs(0), flatten=True):
        # Work in strips of a few tiles, so that concurrent programs share rows and weights.
        strip = job // (STRIP * across)
        within = job % (STRIP * across)
        height = tl.minimum(tiles - strip * STRIP, STRIP)
        tile = strip * STRIP + within % height
        column = within // height
        block = tl.sum((end <= tile * ROWS).to(tl.int32), 0)
        r = tile * ROWS + tl.arange(0, ROWS)
        # Padding rows read sample 0, but their results are never used.
        source = tl.maximum(tl.load(sample + r), 0) if GATHERS else r
        n = column * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        inputs = x + source[:, None].to(tl.int64) * x_stride + k[None, :]
        if not USES_DESCRIPTOR:
            weights = weight + block.to(tl.int64) * weight_block_stride
            weights += n[None, :].to(tl.int64) * weight_output_stride
            weights += k[:, None].to(tl.int64) * weight_input_stride
        z = tl.zeros([ROWS, COLUMNS], ACC_DTYPE)
        for start in range(0, INNER, DEPTH):
            if EVEN:
                a = tl.load(inputs)
            else:
                a = tl.load(inputs, mask=start + k[None, :] < INNER, other=0.0)
            if USES_DESCRIPTOR:
                # The matrix has shape (outputs, inputs), and a block is a range of rows or columns.
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
                weights += DEPTH * weight_input_stride
            z = tl.dot(a, w, z, input_precision="ieee", out_dtype=ACC_DTYPE)
            inputs += DEPTH
        if HAS_BIAS:
            z += tl.load(bias + block * width + n, mask=n < width, other=0.0).to(ACC_DTYPE)[None, :]
        entry = r[:, None].to(tl.int64) * width + n[None, :]
        inside = (n < width)[None, :]
        z = _activate(z, ACTIVATION)
        if SCALES:
            z *= tl.load(gate + source.to(tl.int64) * blocks + block).to(ACC_DTYPE)[:, None]
        if MULTIPLIES:
            z *= tl.load(value + entry, mask=inside, other=0.0).to(ACC_DTYPE)
        tl.store(out + entry, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate(
    raw,
    sample,
    ends,
    gate,
    value,
    out,
    blocks,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Compute each row's units from its products: ``g act(raw) value``."""
    b = tl.arange(0, BLOCKS)
    end = tl.load(ends + b, mask=b < blocks, other=2147483647)
    rows = tl.load(ends + blocks - 1)
    row = tl.program_id(0)
    while row < rows:
        source = tl.maximum(tl.load(sample + row), 0).to(tl.int64)
        block = tl.sum((end <= row).to(tl.int32), 0)
        scale = tl.load(gate + source * blocks + block).to(ACC_DTYPE) if SCALES else 1.0
        for start in range(0, WIDTH, COLUMNS):
            n = start + tl.arange(0, COLUMNS)
            offset = row.to(tl.int64) * WIDTH + n
            z = tl.load(raw + offset, mask=n < WIDTH, other=0.0).to(ACC_DTYPE)
            units = _activate(z, ACTIVATION) * scale
            if MULTIPLIES:
                units *= tl.load(value + offset, mask=n < WIDTH, other=0.0).to(ACC_DTYPE)
            tl.store(out + offset, units.to(out.dtype.element_ty), mask=n < WIDTH)
        row += tl.num_programs(0)


@triton.jit
def gather(x, sample, ends, out, blocks, width, x_stride, COLUMNS: tl.constexpr):
    """Copy each row's sample, and fill padding rows with 0."""
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
    grad_hidden,
    raw,
    sample,
    ends,
    gate,
    value,
    grad_gate,
    grad_value,
    blocks,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Propagate a gradient through gate and activation in place, and compute that of `value`.

    With `SUMS`, also compute the gradient of each row's gate: the sum of units * gradient.
    """
    b = tl.arange(0, BLOCKS)
    end = tl.load(ends + b, mask=b < blocks, other=2147483647)
    rows = tl.load(ends + blocks - 1)
    row = tl.program_id(0)
    while row < rows:
        source = tl.load(sample + row)
        pair = tl.maximum(source, 0).to(tl.int64) * blocks + tl.sum((end <= row).to(tl.int32), 0)
        scale = tl.load(gate + pair).to(ACC_DTYPE) if SCALES else 1.0
        total = 0.0
        for start in range(0, WIDTH, COLUMNS):
            n = start + tl.arange(0, COLUMNS)
            offset = row.to(tl.int64) * WIDTH + n
            gradient = tl.load(grad_hidden + offset, mask=n < WIDTH, other=0.0).to(ACC_DTYPE)
            z = tl.load(raw + offset, mask=n < WIDTH, other=0.0).to(ACC_DTYPE)
            hidden = _activate(z, ACTIVATION)
            if MULTIPLIES:
                to_value = gradient * hidden * scale
                tl.store(
                    grad_value + offset, to_value.to(grad_value.dtype.element_ty), mask=n < WIDTH
                )
                gradient *= tl.load(value + offset, mask=n < WIDTH, other=0.0).to(ACC_DTYPE)
            if SUMS:
                total += tl.sum(gradient * hidden, 0)
            gradient *= _activation_grad(z, ACTIVATION) * scale
            tl.store(
                grad_hidden + offset, gradient.to(grad_hidden.dtype.element_ty), mask=n < WIDTH
            )
        if SUMS:
            tl.store(grad_gate + pair, total, mask=source >= 0)
        row += tl.num_programs(0)


@triton.jit
def sum_blocks(
    packed, ends, out, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC_DTYPE: tl.constexpr
):
    """Sum the rows of each block, with several programs that each sum a share of the rows."""
    block = tl.program_id(0)
    part = tl.program_id(2)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(ends + block - 1, mask=block > 0, other=0) + part * ROWS
    end = tl.load(ends + block)
    total = tl.zeros([COLUMNS], ACC_DTYPE)
    while row < end:
        r = row + tl.arange(0, ROWS)
        offset = packed + r[:, None].to(tl.int64) * width + n[None, :]
        total += tl.sum(tl.load(offset, mask=(n < width)[None, :], other=0.0).to(ACC_DTYPE), 0)
        row += ROWS * tl.num_programs(2)
    offset = (part * tl.num_programs(0) + block) * width + n
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=n < width)


@triton.jit
def sum_samples(
    packed,
    position,
    bias,
    out,
    width,
    HAS_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Sum the rows of each sample and add the bias."""
    sample = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], ACC_DTYPE)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < width, other=0.0).to(ACC_DTYPE)
    for b in range(0, BLOCKS):
        row = tl.load(position + sample * BLOCKS + b)
        if row >= 0:
            total += tl.load(packed + row.to(tl.int64) * width + n, mask=n < width).to(ACC_DTYPE)
    tl.store(out + sample.to(tl.int64) * width + n, total.to(out.dtype.element_ty), mask=n < width)


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
    """Compute p and hard gates for a tile of samples, and count the open gates per block.

    The float32 weight is split into two half-precision parts, which keeps at least 16 bits of its
    mantissa. Sums are accumulated in float32.
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
def few_gates(
    x,
    weight,
    bias,
    temperature,
    threshold,
    probability,
    gate,
    samples,
    blocks,
    x_stride,
    HAS_BIAS: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute p and hard gates of one block for a few samples, in float32."""
    block = tl.program_id(0)
    offset = tl.load(bias + block) if HAS_BIAS else 0.0
    for sample in range(0, samples):
        total = tl.zeros([DEPTH], tl.float32)
        for start in range(0, INNER, DEPTH):
            k = start + tl.arange(0, DEPTH)
            h = tl.load(x + sample * x_stride + k, mask=k < INNER, other=0.0).to(tl.float32)
            total += h * tl.load(weight + block * INNER + k, mask=k < INNER, other=0.0)
        p = tl.sigmoid((tl.sum(total, 0) + offset) / tl.load(temperature))
        pair = sample * blocks + block
        tl.store(probability + pair, p)
        tl.store(gate + pair, (p > tl.load(threshold)).to(tl.float32))


@triton.jit
def _open_blocks(gate, samples, blocks, BLOCKS: tl.constexpr):
    """Count the blocks up to each one that any of a few samples opens."""
    b = tl.arange(0, BLOCKS)
    is_open = tl.zeros([BLOCKS], tl.int32)
    for sample in range(0, samples):
        g = tl.load(gate + sample * blocks + b, mask=b < blocks, other=0)
        is_open = tl.maximum(is_open, (g != 0).to(tl.int32))
    return tl.cumsum(is_open, 0)


@triton.jit
def few_units(
    x,
    gate,
    weight,
    bias,
    value_weight,
    value_bias,
    units,
    samples,
    blocks,
    x_stride,
    HAS_BIAS: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_VALUE_BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    INNER: tl.constexpr,
    SAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Compute the units of open blocks for a few samples. Programs share the open blocks."""
    count = _open_blocks(gate, samples, blocks, BLOCKS)
    chunks: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    s = tl.arange(0, SAMPLES)
    for job in range(tl.program_id(0), tl.max(count, 0) * chunks, tl.num_programs(0)):
        block = tl.sum((count <= job // chunks).to(tl.int32), 0)
        n = job % chunks * COLUMNS + tl.arange(0, COLUMNS)
        unit = block * BLOCK + n
        row = unit.to(tl.int64) * INNER
        z = tl.zeros([COLUMNS, SAMPLES], ACC_DTYPE)
        v = tl.zeros([COLUMNS, SAMPLES], ACC_DTYPE)
        for start in range(0, INNER, DEPTH):
            k = start + tl.arange(0, DEPTH)
            inside = (n < BLOCK)[:, None] & (k < INNER)[None, :]
            sampled = (s < samples)[None, :] & (k < INNER)[:, None]
            h = tl.load(x + s[None, :] * x_stride + k[:, None], mask=sampled, other=0.0)
            w = tl.load(weight + row[:, None] + k[None, :], mask=inside, other=0.0)
            z = tl.dot(w, h, z, input_precision="ieee", out_dtype=ACC_DTYPE)
            if HAS_VALUE:
                w = tl.load(value_weight + row[:, None] + k[None, :], mask=inside, other=0.0)
                v = tl.dot(w, h, v, input_precision="ieee", out_dtype=ACC_DTYPE)
        if HAS_BIAS:
            z += tl.load(bias + unit, mask=n < BLOCK, other=0.0).to(ACC_DTYPE)[:, None]
        z = _activate(z, ACTIVATION)
        if HAS_VALUE:
            if HAS_VALUE_BIAS:
                v += tl.load(value_bias + unit, mask=n < BLOCK, other=0.0).to(ACC_DTYPE)[:, None]
            z *= v
        g = tl.load(gate + s * blocks + block, mask=s < samples, other=0.0).to(ACC_DTYPE)
        if SCALES:
            z *= g[None, :]
        z = tl.where((g != 0.0)[None, :], z, 0.0)
        entry = units + s[None, :] * (blocks * BLOCK) + unit[:, None]
        tl.store(
            entry, z.to(units.dtype.element_ty), mask=(s < samples)[None, :] & (n < BLOCK)[:, None]
        )


@triton.jit
def few_outputs(
    units,
    gate,
    weight,
    partial,
    samples,
    blocks,
    width,
    output_stride,
    unit_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Multiply the units of open blocks by their outgoing weights, for a few samples.

    Programs with the same outputs share the open blocks, and store partial sums.
    """
    count = _open_blocks(gate, samples, blocks, BLOCKS)
    chunks = tl.cdiv(BLOCK, DEPTH)
    s = tl.arange(0, SAMPLES)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS, SAMPLES], ACC_DTYPE)
    for job in range(tl.program_id(1), tl.max(count, 0) * chunks, tl.num_programs(1)):
        block = tl.sum((count <= job // chunks).to(tl.int32), 0)
        k = job % chunks * DEPTH + tl.arange(0, DEPTH)
        unit = (block * BLOCK + k).to(tl.int64)
        w = tl.load(
            weight + n[:, None] * output_stride + unit[None, :] * unit_stride,
            mask=(n < width)[:, None] & (k < BLOCK)[None, :],
            other=0.0,
        )
        h = tl.load(
            units + s[None, :] * (blocks * BLOCK) + unit[:, None],
            mask=(s < samples)[None, :] & (k < BLOCK)[:, None],
            other=0.0,
        )
        total = tl.dot(w, h, total, input_precision="ieee", out_dtype=ACC_DTYPE)
    entry = partial + (tl.program_id(1) * samples + s[None, :]) * width + n[:, None]
    tl.store(entry, total, mask=(s < samples)[None, :] & (n < width)[:, None])


@triton.jit
def few_sums(
    partial,
    bias,
    out,
    splits,
    size,
    width,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Add up partial sums and the bias."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], ACC_DTYPE)
    for part in range(0, splits):
        total += tl.load(partial + part * size + n, mask=n < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n % width, mask=n < size, other=0.0).to(ACC_DTYPE)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < size)


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
    """Replace counts by the first row of each sample tile, and mark padding rows with -1.

    It runs as one program, because there are few counts. `TILES` is at least `tiles`.
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
        offset = counts + t[:, None] * blocks + b[None, :]
        count = tl.load(offset, mask=inside, other=0)
        tl.store(offset, tl.cumsum(count, 0) - count + first[None, :], mask=inside)
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
