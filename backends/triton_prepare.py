"""What comes before the GEMM kernel, in one launch: the plan and, where `Problem.scales_x`, the scaling of activations.

    program          0 ... PLANNERS - 1           PLANNERS ... PLANNERS + T - 1
    prepare_kernel   plan_slots or plan_bucket    scale_token, where the mode scales x

    plan_slots   few slots: one program compares all pairs of slots
    plan_bucket  more: a program a bucket, each of which counts all buckets by a histogram

Both write shared/planning.py's plan, whatever the routing. Bucket b is expert b; what has no expert goes to bucket E.

One launch instead of two saves a kernel's start and the gap before it, and either half waits for memory while the other
does. Planning comes first: with many slots it takes longer than a token does, and what is longest should start first.
"""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def bucket_of(ids, E: tl.constexpr):
    """Expert number -> bucket: -1, and what is no expert's number at all, to bucket E, whose rows of y are zeros."""
    return tl.where((ids < 0) | (ids >= E), E, ids)


@triton.jit(do_not_specialize=["slots"])
def prepare_kernel(
    topk_ids_ptr,  # (S,)
    popularity_ptr,  # (E,); not read unless POPULARITY is "given"
    x_ptr,  # (T, K), rows x_stride apart; like scaled_ptr and x_scale_ptr not touched unless SCALED_X
    sorted_slot_ptr,  # (max_tile_rows * BLOCK_M,)
    tile_expert_ptr,  # (max_tile_rows,)
    tile_rows_ptr,  # (1,)
    tile_span_ptr,  # (max_tile_rows, 2); not written if POPULARITY is "none"
    scaled_ptr,  # (T, K), float8_e4m3fn or float16
    x_scale_ptr,  # (T,)
    slots,  # S = T * top_k
    E: tl.constexpr,
    MAX_TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BUCKETS: tl.constexpr,  # power of two, at least E + 1
    CHUNK: tl.constexpr,  # slots at a time; with one planner all of them
    POPULARITY: tl.constexpr,  # "none": experts come by number, "counts": by falling slot counts, "given"
    PLANNERS: tl.constexpr,  # 1 or E + 1
    SCALED_X: tl.constexpr,
    x_stride: tl.constexpr,
    K: tl.constexpr,
    K_CHUNK: tl.constexpr,
    HALVES_OF: tl.constexpr,  # 0, or BLOCK_K where the GEMM kernel takes it in two products: `place_of`
):
    """Grid: PLANNERS programs, and T more with SCALED_X."""
    program = tl.program_id(0)
    if program < PLANNERS:
        if PLANNERS == 1:
            plan_slots(
                topk_ids_ptr, popularity_ptr, sorted_slot_ptr, tile_expert_ptr, tile_rows_ptr, tile_span_ptr, slots,
                E, MAX_TILE_ROWS, BLOCK_M, CHUNK, POPULARITY,
            )  # fmt: skip
        else:
            plan_bucket(
                program,
                topk_ids_ptr, popularity_ptr, sorted_slot_ptr, tile_expert_ptr, tile_rows_ptr, tile_span_ptr, slots,
                E, MAX_TILE_ROWS, BLOCK_M, BUCKETS, CHUNK, POPULARITY,
            )  # fmt: skip
    elif SCALED_X:
        token = (program - PLANNERS).to(tl.int64)
        scale_token(token, x_ptr, scaled_ptr, x_scale_ptr, x_stride, K, K_CHUNK, HALVES_OF)


@triton.jit
def plan_slots(
    topk_ids_ptr, popularity_ptr, sorted_slot_ptr, tile_expert_ptr, tile_rows_ptr, tile_span_ptr, slots,
    E: tl.constexpr, MAX_TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, POPULARITY: tl.constexpr,
):  # fmt: skip
    """The whole plan by one program, for at most CHUNK slots, from comparisons [other slot, this slot].

    A slot's rank is how many earlier ones share its bucket. A rank that is a multiple of BLOCK_M opens a tile row, so a
    bucket's first tile row is how many slots of the buckets before it open one.
    """
    LAST: tl.constexpr = 0x7FFFFFFF if POPULARITY == "none" else 0x7FFFFFFFFFFFFFFF
    slot = tl.arange(0, CHUNK)
    valid = slot < slots
    ids = tl.load(topk_ids_ptr + slot, mask=valid, other=-1)

    # All padding and all that is unused while the ids are on their way; the barrier keeps what is stored later on top.
    unused = slot < MAX_TILE_ROWS  # no more tile rows than slots
    tl.store(tile_expert_ptr + slot, -1, mask=unused)
    if POPULARITY != "none":
        tl.store(tile_span_ptr + 2 * slot, slot, mask=unused)
        tl.store(tile_span_ptr + 2 * slot + 1, 1, mask=unused)
    for start in range(0, MAX_TILE_ROWS * BLOCK_M, 1024):
        place = start + tl.arange(0, 1024)
        tl.store(sorted_slot_ptr + place, slots, mask=place < MAX_TILE_ROWS * BLOCK_M)
    tl.debug_barrier()

    bucket = bucket_of(ids, E)
    key = bucket
    if POPULARITY != "none":
        if POPULARITY == "given":
            heat = tl.load(popularity_ptr + bucket, mask=bucket < E, other=0)
        else:
            heat = tl.sum((bucket[:, None] == bucket[None, :]).to(tl.int32), 0)  # bucket E's is not looked at
        # By falling heat, then by number. ~heat falls as heat rises and, unlike -heat, fits for any heat.
        key = (tl.where(bucket == E, 0x7FFFFFFF, ~heat).to(tl.int64) << 32) | bucket
    rank = tl.sum(((key[:, None] == key[None, :]) & (slot[:, None] < slot[None, :])).to(tl.int32), 0)
    opens = valid & (rank % BLOCK_M == 0)
    opener = tl.where(opens, key, LAST)
    first_row = tl.sum((opener[:, None] < key[None, :]).to(tl.int32), 0)

    row = first_row + rank // BLOCK_M
    tl.store(sorted_slot_ptr + row * BLOCK_M + rank % BLOCK_M, slot, mask=valid)
    tl.store(tile_expert_ptr + row, tl.where(bucket == E, -1, bucket), mask=opens)
    tl.store(tile_rows_ptr, tl.sum(opens.to(tl.int32)))
    if POPULARITY != "none":
        own_rows = tl.sum((opener[:, None] == key[None, :]).to(tl.int32), 0)
        tl.store(tile_span_ptr + 2 * row, first_row, mask=opens)
        tl.store(tile_span_ptr + 2 * row + 1, own_rows, mask=opens)


@triton.jit
def plan_bucket(
    bucket,
    topk_ids_ptr, popularity_ptr, sorted_slot_ptr, tile_expert_ptr, tile_rows_ptr, tile_span_ptr, slots,
    E: tl.constexpr, MAX_TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BUCKETS: tl.constexpr, CHUNK: tl.constexpr,
    POPULARITY: tl.constexpr,
):  # fmt: skip
    """Counting sort of slots by bucket: this bucket's rows. Bucket E takes the -1 slots, and the tail.

    Every program counts all buckets again, from L2, instead of waiting for another launch to have done it. Slots keep
    their order, so the plan is the same in every run.
    """
    buckets = tl.arange(0, BUCKETS)
    chunk = tl.arange(0, CHUNK)

    counts = tl.zeros((BUCKETS,), tl.int32)
    for start in range(0, slots, CHUNK):
        in_range = start + chunk < slots
        ids = tl.load(topk_ids_ptr + start + chunk, mask=in_range, other=-1)
        counts += tl.histogram(bucket_of(ids, E), BUCKETS, mask=in_range)
    rows = (counts + BLOCK_M - 1) // BLOCK_M
    before = buckets < bucket
    if POPULARITY != "none":
        heat = counts
        if POPULARITY == "given":
            heat = tl.load(popularity_ptr + buckets, mask=buckets < E, other=0)
            own_heat = tl.load(popularity_ptr + bucket, mask=bucket < E, other=0)
        else:
            own_heat = tl.sum(tl.where(buckets == bucket, counts, 0))
        hotter = (heat > own_heat) | ((heat == own_heat) & before)
        before = (buckets < E) & ((bucket == E) | hotter)
    first_row = tl.sum(tl.where(before, rows, 0))
    own_rows = tl.sum(tl.where(buckets == bucket, rows, 0))
    own_count = tl.sum(tl.where(buckets == bucket, counts, 0))

    placed = first_row * BLOCK_M
    for start in range(0, slots, CHUNK):
        in_range = start + chunk < slots
        ids = tl.load(topk_ids_ptr + start + chunk, mask=in_range, other=-1)
        mine = (bucket_of(ids, E) == bucket) & in_range
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_slot_ptr + placed + rank, start + chunk, mask=mine)
        placed += tl.sum(mine.to(tl.int32))

    end_row = first_row + own_rows
    if POPULARITY != "none":
        for start in range(first_row, end_row, CHUNK):
            tl.store(tile_span_ptr + 2 * (start + chunk), first_row, mask=start + chunk < end_row)
            tl.store(tile_span_ptr + 2 * (start + chunk) + 1, own_rows, mask=start + chunk < end_row)
        if bucket == E:
            for start in range(end_row, MAX_TILE_ROWS, CHUNK):
                tl.store(tile_span_ptr + 2 * (start + chunk), start + chunk, mask=start + chunk < MAX_TILE_ROWS)
                tl.store(tile_span_ptr + 2 * (start + chunk) + 1, 1, mask=start + chunk < MAX_TILE_ROWS)
    expert = bucket
    if bucket == E:
        tl.store(tile_rows_ptr, end_row)
        end_row = MAX_TILE_ROWS
        expert = -1
    for start in range(first_row, end_row, CHUNK):
        tl.store(tile_expert_ptr + start + chunk, expert, mask=start + chunk < end_row)
    for start in range(first_row * BLOCK_M + own_count, end_row * BLOCK_M, CHUNK):
        tl.store(sorted_slot_ptr + start + chunk, slots, mask=start + chunk < end_row * BLOCK_M)


@triton.jit
def place_of(k, HALVES_OF: tl.constexpr):
    """Where value k of a row of x stands in the scaled row: shared/fp8.py's `place_of`; 0: where it stood."""
    if HALVES_OF == 0:
        place = k
    else:
        place = k // HALVES_OF * HALVES_OF + k % 4 // 2 * (HALVES_OF // 2) + k % HALVES_OF // 4 * 2 + k % 2
    return place


@triton.jit
def scale_token(
    token, x_ptr, scaled_ptr, scale_ptr, x_stride: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    HALVES_OF: tl.constexpr,
):  # fmt: skip
    """A row of x to e4m3 or float16 by a power of two: shared/fp8.py's quantise_token or scale_token, bit for bit.

    token: 64-bit, as T * K passes 2**31. A row of one chunk stays in registers; a longer one is read twice.
    """
    TO_FP8: tl.constexpr = scaled_ptr.dtype.element_ty == tl.float8e4nv
    chunk = tl.arange(0, CHUNK)

    x = tl.zeros((CHUNK,), tl.float32)
    largest = tl.zeros((CHUNK,), tl.float32)
    not_finite = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, K, CHUNK):
        x = tl.load(x_ptr + token * x_stride + start + chunk, mask=start + chunk < K, other=0.0).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        largest = tl.maximum(largest, tl.where(finite, tl.abs(x), 0.0))
        not_finite = tl.where(finite, not_finite, 1)
    amax = tl.max(largest, 0)

    # From the bits of amax: for e4m3 the least power of two with amax / scale <= 448 = 1.75 * 2**8, for float16 the one
    # that takes amax to [2**14, 2**15).
    bits = amax.to(tl.int32, bitcast=True)
    if TO_FP8:
        exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    else:
        exponent = (bits >> 23) - 127 - 14
    exponent = tl.where(amax == 0, 0, tl.maximum(exponent, -100))
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)

    for start in range(0, K, CHUNK):
        if CHUNK < K:
            x = tl.load(x_ptr + token * x_stride + start + chunk, mask=start + chunk < K, other=0.0).to(tl.float32)
        scaled = x * inverse
        if TO_FP8:
            scaled = tl.where(tl.abs(x) < float("inf"), scaled, 0.0)
            scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
        scaled_ptrs = scaled_ptr + token * K + place_of(start + chunk, HALVES_OF)
        tl.store(scaled_ptrs, scaled.to(scaled_ptr.dtype.element_ty), mask=start + chunk < K)
    if TO_FP8:  # e4m3 has no infinity: a row that is not finite becomes NaN by its scale
        scale = tl.where(tl.max(not_finite, 0) > 0, float("nan"), scale)
    tl.store(scale_ptr + token, scale)
