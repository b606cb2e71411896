"""Parts that the attention kernels share: loads, which blocks and which elements are seen, the change of the scores.

All positions are int32. "In the run" counts from the first element of a run of queries or keys, whose global position
is the run's start. Scores are in units of log2, so that exp2 serves.
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from autopar.operators import attention_math

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
SWALLOWED: tl.constexpr = tl.constexpr(attention_math.SWALLOWED)
FLOOR: tl.constexpr = tl.constexpr(attention_math.FLOOR * 1.4426950408889634)

NO_BIAS: tl.constexpr = tl.constexpr(0)
FLOAT_BIAS: tl.constexpr = tl.constexpr(1)
BOOL_BIAS: tl.constexpr = tl.constexpr(2)

# Which blocks of a loop are seen in part, so that the window is applied to them.
NO_EDGES: tl.constexpr = tl.constexpr(0)
ALL_EDGES: tl.constexpr = tl.constexpr(1)
SOME_EDGES: tl.constexpr = tl.constexpr(2)

# So many elements share an extent of documents: no kernel has smaller blocks.
DOCUMENT_GRAIN: tl.constexpr = tl.constexpr(16)

# SplitMix64 (Steele, Lea, Flood 2014) of rows and two rounds of lowbias32 (Wellons 2018) of columns, as in
# autopar/operators/positional.py.
GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
STEP: tl.constexpr = tl.constexpr(0x9E3779B1)
ROUND_1: tl.constexpr = tl.constexpr(0x7FEB352D)
ROUND_2: tl.constexpr = tl.constexpr(0x846CA68B)


@triton.jit
def run_start(starts, run, RUNS: tl.constexpr):
    """The global position where a run begins; `starts` is a number where there is one run, else an int32 pointer."""
    if RUNS == 1:
        return starts
    else:
        return tl.load(starts + run)


@triton.jit
def load_rows(
    x, stride, row, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INSIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """x[row : row + ROWS, :SIZE] as [ROWS, BLOCK], zeros beyond `num_rows` and SIZE.

    x: a pointer to rows that are contiguous in themselves, or (TMA) a tensor descriptor of [num_rows, SIZE].
    INSIDE: all rows are below num_rows, so that none needs to be masked.
    """
    if TMA:
        return x.load([row, 0])
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK)
        pointers = x + tl.cast(row, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
        if INSIDE and BLOCK == SIZE:
            return tl.load(pointers)
        elif INSIDE:
            return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
        elif BLOCK == SIZE:
            return tl.load(pointers, mask=(row + rows < num_rows)[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=(row + rows < num_rows)[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def rows_of(x, stride, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """What `load_rows` reads from: the pointer itself, or a tensor descriptor made on the device."""
    if TMA:
        return tl.make_tensor_descriptor(x, [num_rows, SIZE], [stride, 1], [ROWS, BLOCK])
    else:
        return x


@triton.jit
def heads_of(
    x, head_stride, stride, num_heads, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """What `load_head_rows` reads from, made once for all heads: x, a pointer to the first of them, or a tensor
    descriptor of [num_heads, num_rows, SIZE].
    """
    if TMA:
        return tl.make_tensor_descriptor(x, [num_heads, num_rows, SIZE], [head_stride, stride, 1], [1, ROWS, BLOCK])
    else:
        return x


@triton.jit
def load_head_rows(
    x, head, stride, row, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INSIDE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """As `load_rows`, of the rows that x points to, or (TMA) those of one head that `heads_of` describes."""
    if TMA:
        return x.load([head, row, 0]).reshape([ROWS, BLOCK])
    else:
        return load_rows(x, stride, row, num_rows, SIZE, ROWS, BLOCK, INSIDE, False)


@triton.jit
def hold_rows(
    x, stride, row, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """x[row : row + ROWS, :SIZE] as `products` takes it: as `load_rows` gives it, or (CHUNK) pointers to the rows."""
    if CHUNK:
        return x + (row + tl.arange(0, ROWS)).to(tl.int64) * stride
    else:
        return load_rows(x, stride, row, num_rows, SIZE, ROWS, BLOCK, False, TMA)


@triton.jit
def products(
    held, seen, tile, y, stride, row, num_rows, SIZE: tl.constexpr, CHUNK: tl.constexpr, INSIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The products, float32, of rows that `hold_rows` gave with those of tile = y[row : row + tile.shape[0], :SIZE].

    CHUNK: both are read anew, so many columns at a time: operands of whole rows would not fit the registers. Rows that
    are not `seen` and, if not INSIDE, those from num_rows on count as zeros.
    """
    if not CHUNK:
        return tl.dot(held, tl.trans(tile), input_precision=PRECISION)
    else:
        BLOCK: tl.constexpr = tile.shape[1]
        COLUMNS: tl.constexpr = min(CHUNK, BLOCK)
        rows = tl.arange(0, tile.shape[0])
        places = y + tl.cast(row, tl.int64) * stride + rows * stride
        found = tl.zeros([held.shape[0], tile.shape[0]], tl.float32)
        for start in range(0, BLOCK, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (columns < SIZE)[None, :]
            x_mask = seen[:, None] if BLOCK == SIZE else seen[:, None] & inside
            x_tile = tl.load(held[:, None] + columns[None, :], mask=x_mask, other=0.0)
            if INSIDE and BLOCK == SIZE:
                y_tile = tl.load(places[:, None] + columns[None, :])
            else:
                y_mask = inside if INSIDE else (row + rows < num_rows)[:, None] & inside
                y_tile = tl.load(places[:, None] + columns[None, :], mask=y_mask, other=0.0)
            found = tl.dot(x_tile, tl.trans(y_tile), found, input_precision=PRECISION)
        return found


@triton.jit
def key_range(
    first_query, last_query, key_begin, num_keys, left, right, prefix,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which keys of a run the queries first_query .. last_query (global) see, in blocks counted from the run's begin.

    Returns (prefix_end, start, full_start, full_end, end), in the run, all but the ends multiples of BLOCK:
    [0, prefix_end) is seen through the prefix alone; of [start, end), [full_start, full_end) is seen by all.
    """
    start = 0
    end = num_keys
    full_start = 0
    full_end = num_keys
    prefix_end = 0
    if LEFT:
        start = tl.minimum(tl.maximum(first_query - left - key_begin, 0), num_keys) // BLOCK * BLOCK
        full_start = tl.minimum(tl.maximum(last_query - left - key_begin, 0), num_keys)
    if RIGHT:
        end = tl.minimum(tl.maximum(last_query + right + 1 - key_begin, 0), num_keys)
        full_end = tl.minimum(tl.maximum(first_query + right + 1 - key_begin, 0), num_keys)
    if PREFIX:
        in_prefix = tl.minimum(tl.maximum(prefix - key_begin, 0), num_keys)
        if LEFT:
            prefix_end = tl.minimum(in_prefix, start)
        elif RIGHT:
            full_end = tl.maximum(full_end, in_prefix)
        end = tl.maximum(end, in_prefix)
    full_start = tl.maximum((full_start + BLOCK - 1) // BLOCK * BLOCK, start)
    full_end = tl.maximum(full_end // BLOCK * BLOCK, full_start)
    return prefix_end, start, full_start, full_end, end


@triton.jit
def valid_range(first, last, start, full_start, full_end, end, BLOCK: tl.constexpr):
    """What `key_range` says, less the blocks before key `first` of the run and from key `last` on."""
    start = tl.maximum(start, first // BLOCK * BLOCK)
    end = tl.minimum(end, last)
    full_start = tl.maximum(full_start, start)
    full_end = tl.maximum(tl.minimum(full_end, tl.cdiv(end, BLOCK) * BLOCK), full_start)
    return start, full_start, full_end, end


@triton.jit
def document_range(extents, block, num_blocks, run, num_others, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements [first, last) of the other side's run may be of a document that some of BLOCK elements are of.

    extents: int32, per block of DOCUMENT_GRAIN elements, of which `block` is the first, and run of the other side.
    """
    blocks = block + tl.arange(0, BLOCK // DOCUMENT_GRAIN)
    places = extents + (blocks * RUNS + run) * 2
    first = tl.load(places, mask=blocks < num_blocks, other=num_others)
    last = tl.load(places + 1, mask=blocks < num_blocks, other=0)
    return tl.min(first, 0), tl.max(last, 0)


@triton.jit
def query_block(H, num_queries, QUERY_RUNS: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """(batch, head, run, first row of the run) of this program, which holds BLOCK queries of one head."""
    blocks = tl.cdiv(num_queries, BLOCK)
    program = tl.program_id(0)
    block = program % (blocks * QUERY_RUNS)
    if RIGHT:
        # Late queries see more keys: they start first.
        block = blocks * QUERY_RUNS - 1 - block
    head = program // (blocks * QUERY_RUNS) % H
    batch = (program // (blocks * QUERY_RUNS) // H).to(tl.int64)
    return batch, head, block // blocks, block % blocks * BLOCK


@triton.jit
def query_range(
    first_key, last_key, query_begin, num_queries, left, right, prefix,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which queries of a run see the keys first_key .. last_key (global): (start, full_start, full_end, end).

    In the run; all but `end` are multiples of BLOCK. Of [start, end), [full_start, full_end) sees all of the keys.
    """
    start = 0
    end = num_queries
    full_start = 0
    full_end = num_queries
    if RIGHT:
        start = tl.minimum(tl.maximum(first_key - right - query_begin, 0), num_queries)
        full_start = tl.minimum(tl.maximum(last_key - right - query_begin, 0), num_queries)
    if LEFT:
        end = tl.minimum(tl.maximum(last_key + left + 1 - query_begin, 0), num_queries)
        full_end = tl.minimum(tl.maximum(first_key + left + 1 - query_begin, 0), num_queries)
    if PREFIX:
        start = tl.where(first_key < prefix, 0, start)
        end = tl.where(first_key < prefix, num_queries, end)
        full_start = tl.where(last_key < prefix, 0, full_start)
        full_end = tl.where(last_key < prefix, num_queries, full_end)
    start = start // BLOCK * BLOCK
    full_start = tl.maximum((full_start + BLOCK - 1) // BLOCK * BLOCK, start)
    full_end = tl.maximum(full_end // BLOCK * BLOCK, full_start)
    return start, full_start, full_end, end


@triton.jit
def tanh(x):
    """tanh by exp2: 1 - 2 / (exp(2 x) + 1), whose ends are right where exp overflows."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def change(product, multiplier, cap, SOFTCAP: tl.constexpr, RAW: tl.constexpr):
    """(scores, tanh): the products of queries and keys as scores in units of log2, RAW: as they are."""
    bent = product
    if SOFTCAP:
        bent = tanh(product * multiplier)
        product = bent * cap
    elif not RAW:
        product = product * multiplier
    return product, bent


@triton.jit
def hide(
    x, queries, keys, end, left, right, prefix,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """x with -inf where the window hides key from query; global positions that broadcast to x.

    BOUNDED: keys from position `end` on are hidden, too (where there is a limit at all).
    """
    if LEFT or RIGHT:
        if RIGHT:
            last = tl.minimum(queries + right, end - 1) if BOUNDED else queries + right
            seen = keys <= last
            if LEFT:
                seen = seen & (keys >= queries - left)
        else:
            seen = keys >= queries - left
            if BOUNDED:
                seen = seen & (keys < end)
        if PREFIX:
            seen = seen | (keys < (tl.minimum(prefix, end) if BOUNDED else prefix))
        x = tl.where(seen, x, float("-inf"))
    return x


@triton.jit
def add_bias(x, pointers, mask, BIAS: tl.constexpr):
    """x (in units of log2) with a float bias added, or -inf where a bool one (uint8) is zero.

    A score of which a large negative bias leaves nothing counts as FLOOR, as in `attention_math`: where a query sees
    nothing else, the logarithm of how many there are would vanish beside -3e38.
    """
    if BIAS == FLOAT_BIAS:
        added = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        x = tl.where((added < SWALLOWED) & (added > float("-inf")), FLOOR, x + tl.maximum(added, SWALLOWED) * LOG2_E)
        x = tl.where(added == float("-inf"), added, x)
    elif BIAS == BOOL_BIAS:
        x = tl.where(tl.load(pointers, mask=mask, other=0) != 0, x, float("-inf"))
    return x


@triton.jit
def masked(
    x, bias, bias_stride, query_seen, keys, own_documents, documents,
    start, full_start, full_end, num_keys, queries, key_begin,
    left, right, prefix, BIAS: tl.constexpr, KEYS: tl.constexpr, DOCUMENTS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scores of BLOCK keys from `start` of a run on, biased, -inf where a key is hidden or not there.

    bias: per query, a pointer to its first element in the run. own_documents: of the queries; documents: points to
    those of the run's keys. EDGES: whether none, all, or those outside
    full_start .. full_end are blocks that are seen in part.
    """
    offsets = tl.arange(0, BLOCK)
    columns = start + offsets
    if BIAS != NO_BIAS:
        mask = query_seen[:, None] & (columns < num_keys)[None, :]
        pointers = (bias + tl.cast(start, tl.int64) * bias_stride)[:, None] + (offsets * bias_stride)[None, :]
        x = add_bias(x, pointers, mask, BIAS)
    if KEYS:
        x = tl.where((tl.load(keys + columns, mask=columns < num_keys, other=0) != 0)[None, :], x, float("-inf"))
    if DOCUMENTS:
        others = tl.load(documents + columns, mask=columns < num_keys, other=0)
        x = tl.where(own_documents[:, None] == others[None, :], x, float("-inf"))
    positions = (key_begin + columns)[None, :]
    end = key_begin + num_keys
    if EDGES == ALL_EDGES and not RIGHT and not LEFT:
        x = tl.where((columns < num_keys)[None, :], x, float("-inf"))
    elif EDGES == ALL_EDGES:
        x = hide(x, queries[:, None], positions, end, left, right, prefix, LEFT, RIGHT, PREFIX, True)
    elif EDGES == SOME_EDGES:
        if (start < full_start) | (start >= full_end):
            x = hide(x, queries[:, None], positions, end, left, right, prefix, LEFT, RIGHT, PREFIX, True)
    return x


@triton.jit
def mixed(z):
    """SplitMix64's finalizer, of uint64."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def row_keys(state, rows):
    """The keys from which dropout draws for these rows (uint64, numbers of rows in the whole tensor of probabilities).

    state: uint64, the seed plus the salt's step.
    """
    return mixed(mixed(state) + rows * GAMMA)


@triton.jit
def is_kept(keys, columns, threshold):
    """Whether dropout keeps the elements of rows with these keys, at these columns. threshold: `drop_threshold`."""
    z = columns.to(tl.uint32) * STEP + keys.to(tl.uint32)
    z = (z ^ (z >> 16)) * ROUND_1 + (keys >> 32).to(tl.uint32)
    z = (z ^ (z >> 15)) * ROUND_2
    return (z.to(tl.int32, bitcast=True) >> 1) >= threshold
