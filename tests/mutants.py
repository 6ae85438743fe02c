"""Kernels with one fault each, which the suite must catch: `python -m tests.mutants [--list] [NAME ...]`.

A mutant is one replacement in one source file. It is applied to a copy of the tree in a temporary folder, where the
part of the suite that should notice is run. The same part is run on the unchanged copy first and must be green, so
that red means the fault. A mutant that no test notices makes the command fail.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRITON, PREPARE = "backends/triton_kernel.py", "backends/triton_prepare.py"
PALLAS, MOSAIC = "backends/pallas_triton.py", "backends/pallas_mosaic.py"
THREADS = "backends/mosaic_threads.py"
CLUSTERS = ("tests/test_mosaic.py", "-k", "adds_parts_of_k_on_a_gpu and fp16")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """old -> new, where old stands once in file; tests: pytest's arguments that select who should notice.

    on_gpu: they run on a GPU alone, so that without one there is no verdict.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    on_gpu: bool = False


def gemm(backend: str, select: str) -> tuple[str, ...]:
    return ("tests/test_moe_gemm.py", "-k", f"{backend} and ({select})")


def compiled(backend: str, select: str) -> tuple[str, ...]:
    return ("tests/test_compile_only.py", "-k", f"{backend} and ({select})")


def split(backend: str, select: str) -> tuple[str, ...]:
    return ("tests/test_moe_gemm.py", "-k", f"{backend} and test_split_k and ({select})")


def two_blocks(backend: str) -> tuple[str, ...]:
    return ("tests/test_moe_gemm.py", "-k", f"{backend} and two_blocks and not split")


def half_tails(backend: str) -> tuple[str, ...]:
    return ("tests/test_moe_gemm.py", "-k", f"{backend} and half_is_multiplied")


def words(backend: str) -> tuple[str, ...]:
    return ("tests/test_words.py", "-k", f"{backend} or words_need")


T = "torch-triton"
MUTANTS = (
    # The Triton kernel
    Mutant("skipped tile", TRITON, "if pid >= tiles * PARTS:", "if pid >= tiles * PARTS - 1:", gemm(T, "ragged and fp16")),
    Mutant("swapped divisors", TRITON, "row = pid % tile_rows\n", "row = pid % tile_cols\n", ("tests/test_tile_order.py", "-k", "triton_equals and column")),
    Mutant("swapped divisors, seen in y", TRITON, "row = pid % tile_rows\n", "row = pid % tile_cols\n", gemm(T, "many-rows and fp16 and column")),
    Mutant("last band not cut", TRITON, "rows = min(GROUP_M, tile_rows - first_row)", "rows = GROUP_M", gemm(T, "many-rows and fp16 and grouped")),
    Mutant("wrong expert", TRITON, "expert = tl.load(tile_expert_ptr + row)", "expert = tl.load(tile_expert_ptr + row * 0)", gemm(T, "ragged and fp16 and row")),
    Mutant("wrong token", TRITON, "token = slot // TOP_K\n    return", "token = slot // 2\n    return", gemm(T, "repeated-expert")),
    Mutant("shifted column mask", TRITON, "& (n < N)[None, :]", "& (n < N - 1)[None, :]", gemm(T, "ragged and fp16 and row")),
    Mutant("shifted row mask", TRITON, "row_valid = slot < slots", "row_valid = slot < slots - 1", gemm(T, "ragged and fp16 and row")),
    Mutant("shifted K mask", TRITON, "k_valid = k < K\n", "k_valid = k < K - 1\n", gemm(T, "ragged and fp16 and row")),
    Mutant("unmasked K tail", TRITON, "MASK_K: tl.constexpr = K % BLOCK_K != 0", "MASK_K: tl.constexpr = K < 0", gemm(T, "ragged and fp16 and row")),
    Mutant("K tail of w unmasked, times zero", TRITON, "w_read = tl.load(w_ptrs, mask=k_valid[None, :], other=0.0)", "w_read = tl.load(w_ptrs)", ("tests/test_moe_gemm.py", "-k", "torch_strides")),
    Mutant("last K step dropped", TRITON, "first_step, end_step = 0, steps", "first_step, end_step = 0, steps - 1", gemm(T, "ragged and fp16 and row")),
    Mutant("K steps overlap", TRITON, "w_ptrs += BLOCK_K // W_VALUES\n", "w_ptrs += BLOCK_K // W_VALUES - 1\n", gemm(T, "ragged and fp16 and row")),
    Mutant("split: every part reads the first's K", TRITON, "k = first_step * BLOCK_K + tl.arange(0, DEPTH)", "k = tl.arange(0, DEPTH)", split(T, "fp16-two-pass")),
    Mutant("split: last steps dropped", TRITON, "end_step = min(first_step + part_steps, steps)", "end_step = min(first_step + part_steps, steps - 1)", split(T, "fp16-two-pass")),
    Mutant("K mask stays at the first step", TRITON, "        k += BLOCK_K\n", "", gemm(T, "ragged and fp16 and row")),
    Mutant("split: block scale of the first part", TRITON, "block_scale_ptrs + step * BLOCK_K // 128", "block_scale_ptrs + (step - first_step) * BLOCK_K // 128", split(T, "w8a16-block-two-pass")),
    Mutant("split: sums not cleared", TRITON, "tl.store(sums_ptr + slot.to(tl.int64) * N + n, zeros, mask=n < N)", "tl.store(sums_ptr + slot.to(tl.int64) * N + n, zeros, mask=n < 0)", split(T, "fp16-atomic-fp32")),
    Mutant("split: y not cleared", TRITON, "tl.store(sums_ptr + slot.to(tl.int64) * N + n, zeros, mask=n < N)", "tl.store(sums_ptr + slot.to(tl.int64) * N + n, zeros, mask=n < 0)", split(T, "again")),
    Mutant("split: a part too few added", TRITON, "tl.static_range(PARTS)", "tl.static_range(PARTS - 1)", split(T, "fp16-two-pass")),
    Mutant("split: stored instead of added", TRITON, 'if REDUCTION == "atomic" or REDUCTION == "atomic-fp32":', 'if REDUCTION == "atomic":', split(T, "fp16-atomic-fp32")),
    Mutant("split: scaled twice", TRITON, 'REDUCTION == "two-pass" or REDUCTION == "atomic-fp32"  # scaled', 'REDUCTION == "two-pass"  # scaled', split(T, "w8a16-channel-atomic-fp32")),
    Mutant("split: parts share their place", TRITON, "y_ptr += tl.cast(part, tl.int64) * slots * N", "y_ptr += tl.cast(part, tl.int64) * 0", split(T, "fp16-two-pass")),
    Mutant("split: place of a part in 32 bits", TRITON, "sums_ptrs += tl.cast(slots, tl.int64) * N", "sums_ptrs += slots * N", ("tests/test_compile_only.py", "-k", "small_kernels")),
    Mutant("split: additions ordered", TRITON, 'sem="relaxed"', 'sem="acq_rel"', compiled(T, "split_k and fp16-atomic")),
    Mutant("popular: next expert's tiles", TRITON, "span_ptr = tile_span_ptr + 2 * (pid // tile_cols)", "span_ptr = tile_span_ptr + 2 * (pid // tile_cols + 1)", ("tests/test_tile_order.py", "-k", "triton_equals and popular")),
    Mutant("popular: span off by one", PREPARE, "+ 1, own_rows, mask=start", "+ 1, own_rows + 1, mask=start", ("tests/test_planning.py", "-k", "triton and larger_plans and 40-2-15")),
    Mutant("popular: ties by falling number", PREPARE, "((heat == own_heat) & before)", "((heat == own_heat) & (buckets > bucket))", ("tests/test_planning.py", "-k", "triton and larger_plans and 40-2-15")),
    Mutant("popular: given popularity not read", PREPARE, '"given":\n            heat = tl.load(popularity_ptr + buckets', '"":\n            heat = tl.load(popularity_ptr + buckets', ("tests/test_planning.py", "-k", "triton and larger_plans and 40-2-15")),
    Mutant("dropped channel scale", TRITON, "acc *= w_scale[:, None] if SWAP_AB else w_scale[None, :]", "acc *= 1.0", gemm(T, "ragged and w8a16-channel")),
    Mutant("channel scale of another expert", TRITON, "w_scale_ptr + expert.to(tl.int64) * N + n_read", "w_scale_ptr + n_read", gemm(T, "ragged and w8a16-channel")),
    Mutant("block scale row wrong", TRITON, "+ n_read // 128) * scale_cols", "+ n_read // 256) * scale_cols", gemm(T, "scale-blocks and block")),
    Mutant("block scale column wrong", TRITON, "block_scale_ptrs + step * BLOCK_K // 128", "block_scale_ptrs + step * 0", gemm(T, "scale-blocks and block")),
    Mutant("dropped token scale", TRITON, "scale = tl.load(x_scale_ptr + token, mask=row_valid, other=0.0)", "scale *= 1.0", gemm(T, "spread and fp8 or ragged and w8a8-channel")),
    Mutant("dropped routing weight", TRITON, "scale *= tl.load(topk_weight_ptr + slot, mask=row_valid, other=0.0)", "scale *= 1.0", gemm(T, "ragged and fp16 and row")),
    Mutant("routing weight of the token", TRITON, "topk_weight_ptr + slot,", "topk_weight_ptr + token,", gemm(T, "ragged and fp16 and row")),
    Mutant("-1 rows not zeroed", TRITON, "tl.zeros((ROWS, BLOCK_N), tl.float32), slot,", "tl.full((ROWS, BLOCK_N), float('nan'), tl.float32), slot,", gemm(T, "minus-one")),
    Mutant("-1 rows not written", TRITON, "tl.zeros((ROWS, BLOCK_N), tl.float32), slot, slots,", "tl.zeros((ROWS, BLOCK_N), tl.float32), slot, 0,", gemm(T, "minus-one")),
    Mutant("expert offset in 32 bits", TRITON, "expert.to(tl.int64) * w_stride_e", "expert * w_stride_e", compiled(T, "offsets")),
    Mutant("row offset in 32 bits", TRITON, "y_ptrs = y_ptr + slot.to(tl.int64)[:, None] * N", "y_ptrs = y_ptr + slot[:, None] * N", compiled(T, "offsets")),
    Mutant("FP8 widened before the product", TRITON, 'if SCALES != "none" and not QUANTISED_X:', 'if SCALES != "none":\n            x = x.to(tl.float16)', compiled(T, "test_compiles and w8a8-channel")),
    Mutant("plan: padding off by one", PREPARE, "first_row * BLOCK_M + own_count, end_row", "first_row * BLOCK_M + own_count + 1, end_row", ("tests/test_planning.py", "-k", "triton")),
    Mutant("plan: a tile row too many", PREPARE, "rows = (counts + BLOCK_M - 1) // BLOCK_M", "rows = counts // BLOCK_M + 1", ("tests/test_planning.py", "-k", "triton")),
    Mutant("plan: ranks from one", PREPARE, "tl.cumsum(mine.to(tl.int32), 0) - 1", "tl.cumsum(mine.to(tl.int32), 0)", ("tests/test_planning.py", "-k", "triton")),
    Mutant("plan: unused tile rows keep an expert", PREPARE, "end_row = MAX_TILE_ROWS\n", "end_row = end_row\n", ("tests/test_planning.py", "-k", "triton")),
    Mutant("few slots: padding is a slot", PREPARE, "tl.store(sorted_slot_ptr + place, slots,", "tl.store(sorted_slot_ptr + place, slots - 1,", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: unused tile rows keep an expert", PREPARE, "tl.store(tile_expert_ptr + slot, -1, mask=unused)", "tl.store(tile_expert_ptr + slot, 0, mask=unused)", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: ranks from one", PREPARE, "(slot[:, None] < slot[None, :])", "(slot[:, None] <= slot[None, :])", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: one tile row a bucket", PREPARE, "opens = valid & (rank % BLOCK_M == 0)", "opens = valid & (rank == 0)", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: what is no slot opens a tile row", PREPARE, "opens = valid & (rank % BLOCK_M == 0)", "opens = rank % BLOCK_M == 0", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: given popularity not read", PREPARE, '"given":\n            heat = tl.load(popularity_ptr + bucket,', '"":\n            heat = tl.load(popularity_ptr + bucket,', ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: popularity negated", PREPARE, "0x7FFFFFFF, ~heat)", "0x7FFFFFFF, -heat)", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: -1 rows by popularity", PREPARE, "tl.where(bucket == E, 0x7FFFFFFF, ~heat)", "(~heat)", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: span off by one", PREPARE, "+ 1, own_rows, mask=opens)", "+ 1, own_rows + 1, mask=opens)", ("tests/test_planning.py", "-k", "triton and not buckets")),
    Mutant("few slots: span off by one, seen in y", PREPARE, "+ 1, own_rows, mask=opens)", "+ 1, own_rows + 1, mask=opens)", gemm(T, "many-rows and fp16 and popular")),
    Mutant("second chunk of a row taken for the first", PREPARE, "if CHUNK < K:", "if False:", ("tests/test_fp8.py", "-k", "triton and row_lengths")),
    Mutant("token scale off by a factor of 2", PREPARE, "> 0x600000)", "> 0x700000)", ("tests/test_fp8.py", "-k", "triton")),
    Mutant("NaN token not marked", PREPARE, 'tl.where(tl.max(not_finite, 0) > 0, float("nan"), scale)', "scale", ("tests/test_fp8.py", "-k", "triton")),
    Mutant("two blocks: tail not multiplied", TRITON, "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + HALF) < slots)", "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + HALF) < 0)", two_blocks(T)),
    Mutant("two blocks: a tail of one slot not seen", TRITON, "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + HALF) < slots)", "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + HALF + 1) < slots)", two_blocks(T)),
    Mutant("row order: parts of another number of tiles", TRITON, "tiles = tl.num_programs(0) // PARTS", "tiles = tl.num_programs(0) // PARTS + 1", ("tests/test_moe_gemm.py", "-k", "torch-triton and two_blocks and split")),
    Mutant("words: halves exchanged", TRITON, "w = widen_half(w_read, product)", "w = widen_half(w_read, 1 - product)", words(T)),
    Mutant("words: a byte taken twice", TRITON, "tl.join(first, second)", "tl.join(first, first)", words(T)),
    Mutant("words: second half of x not read", TRITON, "x = load_x(x_ptrs + product * DEPTH,", "x = load_x(x_ptrs,", words(T)),
    Mutant("words: x in its own order", PREPARE, "token * K + place_of(start + chunk, HALVES_OF)", "token * K + start + chunk", words(T)),
    Mutant("words: of rows that start anywhere", "backends/triton_launch.py", "(w_address, w_stride_e, w_stride_n)", "(w_address, w_stride_e)", words(T)),
    Mutant("two blocks: tail has the head's slots", TRITON, "tail_slot = tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS +", "tail_slot = tl.load(sorted_slot_ptr + row * BLOCK_M +", two_blocks(T)),
    Mutant("two blocks: -1 rows of the tail not written", TRITON, "tl.zeros((TAIL, BLOCK_N), tl.float32), tail_slot, slots,", "tl.zeros((TAIL, BLOCK_N), tl.float32), tail_slot, 0,", two_blocks(T)),
    Mutant("two blocks: the tail's rows of x do not go on", TRITON, "tail_ptrs += BLOCK_K", "tail_ptrs += 0", two_blocks(T)),
    Mutant("half tail: not multiplied", TRITON, "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS) < slots)", "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS) < 0)", half_tails(T)),
    Mutant("half tail: a tail of one slot not seen", TRITON, "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS) < slots)", "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + 1) < slots)", half_tails(T)),
    Mutant("half tail: taken for a slot too many", TRITON, "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + HALF) < slots)", "(tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + HALF + 1) < slots)", half_tails(T)),
    Mutant("half tail: has the head's slots", TRITON, "half_slot = tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS +", "half_slot = tl.load(sorted_slot_ptr + row * BLOCK_M +", half_tails(T)),
    # The Pallas kernel, Triton lowering
    Mutant("pallas: skipped tile", PALLAS, "pl.when(pid < tiles * parts)(one_tile)", "pl.when(pid < tiles * parts - 1)(one_tile)", gemm("pallas-triton", "ragged and bf16 and grouped")),
    Mutant("pallas: last band not cut", PALLAS, "rows = jnp.minimum(group_m, tile_rows - first_row)", "rows = jnp.int32(group_m)", ("tests/test_tile_order.py", "-k", "pallas_equals and pallas-triton")),
    Mutant("pallas: shifted mask", PALLAS, "(n < n_size)[None, :]", "(n < n_size - 1)[None, :]", gemm("pallas-triton", "ragged and fp16 and row")),
    Mutant("pallas: first half of a K step twice", PALLAS, "k = index * block_k + half * depth + lax.iota", "k = index * block_k + lax.iota", ("tests/test_moe_gemm.py", "-k", "two_products")),
    Mutant("pallas: second half of a K step left out", PALLAS, "for w, k, k_valid in weights:", "for w, k, k_valid in weights[:1]:", ("tests/test_moe_gemm.py", "-k", "two_products")),
    Mutant("pallas: unmasked K tail", PALLAS, "if k_size % block_k:", "if k_size < 0:", gemm("pallas-triton", "ragged and fp16 and row")),
    Mutant("pallas: wrong expert", PALLAS, 'ref["tile_expert"][row]', 'jnp.minimum(ref["tile_expert"][row], 0)', gemm("pallas-triton", "ragged and fp16 and row")),
    Mutant("pallas: dropped channel scale", PALLAS, 'if problem.scale_layout == "channel" and not sums_only:', "if False:", gemm("pallas-triton", "ragged and w8a16-channel and column")),
    Mutant("pallas: block scale wrong", PALLAS, "lax.div(k, SCALE_BLOCK)", "lax.div(k, 2 * SCALE_BLOCK)", gemm("pallas-triton", "scale-blocks and w8a8-block")),
    Mutant("pallas: -1 rows not written", PALLAS, "@pl.when(jnp.logical_not(has_expert))", "@pl.when(expert < -1)", gemm("pallas-triton", "some-minus-one and w8a16-block")),
    Mutant("pallas: FP8 promoted to float16", "backends/pallas_triton_ops.py", "max_num_imprecise_acc=IMPRECISE_ACCUMULATIONS", "max_num_imprecise_acc=0", compiled("pallas-triton", "test_compiles and w8a8-block")),
    Mutant("pallas split: first step dropped", PALLAS, "first_step = part * config.k_steps_per_split(k_size)", "first_step = part * config.k_steps_per_split(k_size) + 1", split("pallas-triton", "two-pass")),
    Mutant("pallas split: added without a mask", PALLAS, "atomic_add(target, y.astype(ref[\"y\"].dtype), valid)", "atomic_add(target, y.astype(ref[\"y\"].dtype), valid | ~valid)", split("pallas-triton", "atomic")),
    Mutant("pallas split: not cleared", PALLAS, "before = zeros(output, before, interpret, name=f\"{KERNEL_NAME}_zero\")", "before = zeros(output, before, interpret, name=f\"{KERNEL_NAME}_zero\") + 1", split("pallas-triton", "again")),
    Mutant("pallas split: a part too few added", "backends/pallas_triton_rows.py", "for part in range(parts):", "for part in range(parts - 1):", split("pallas-triton", "two-pass")),
    Mutant("pallas pairs: the lower byte twice", PALLAS, "widen_pairs(w_read, half)", "widen_pairs(w_read, 0)", ("tests/test_words.py", "-k", "results_of_pairs and one-block")),
    Mutant("pallas pairs: x in its own order", PALLAS, "halves_of = config.block_k if _reads_pairs(problem, config) else 0", "halves_of = 0", ("tests/test_words.py", "-k", "results_of_pairs and one-block")),
    Mutant("pallas pairs: x in its own order behind many slots", "backends/pallas_triton_prepare.py", "problem, name=NAME, interpret=interpret, halves_of=halves_of)", "problem, name=NAME, interpret=interpret)", ("tests/test_words.py", "-k", "behind_every_plan")),
    Mutant("pallas split: sums of no expert added", "backends/pallas_triton_rows.py", "(expert >= 0) & (expert < problem.experts)", "(expert >= 0)", ("tests/test_moe_gemm.py", "-k", "parts_are_added and pallas-triton")),
    Mutant("pallas split: NaN of a slot without an expert", "backends/pallas_triton_rows.py", "acc = jnp.where(has_expert, acc, 0.0)", "acc = acc + 0.0", ("tests/test_moe_gemm.py", "-k", "parts_are_added and pallas-triton")),
    Mutant("pallas popular: span of the wrong row", PALLAS, "tile_span[by_rows, 0], tile_span[by_rows, 1]", "tile_span[by_rows, 0], tile_span[by_rows, 1] + 1", ("tests/test_tile_order.py", "-k", "pallas_equals and popular and pallas-triton")),
    Mutant("pallas two blocks: tail not multiplied", PALLAS, "pl.when(tall)", "pl.when(expert < -1)", two_blocks("pallas-triton")),
    Mutant("pallas two blocks: no tile without a tail", PALLAS, "has_expert & jnp.logical_not(tall)", "has_expert & (expert < 0)", two_blocks("pallas-triton")),
    Mutant("pallas plan: equal ranks", "backends/pallas_triton_prepare.py", "(slot[:, None] < slot[None, :])", "(slot[:, None] < slot[None, :] - 1)", ("tests/test_planning.py", "-k", "one_expert and pallas")),
    Mutant("pallas plan: tile rows overlap", "backends/pallas_triton_prepare.py", "opener[:, None] < bucket[None, :]", "opener[:, None] < bucket[None, :] - 1", ("tests/test_planning.py", "-k", "larger_plans and pallas")),
    Mutant("pallas plan: padding not filled", "backends/pallas_triton_prepare.py", "jnp.full_like(place, slots)", "jnp.full_like(place, 0)", ("tests/test_planning.py", "-k", "larger_plans and pallas")),
    Mutant("pallas plan: slots of a chunk counted twice", "backends/pallas_prepare.py", "return before + jnp.sum(mine)", "return before * 0 + jnp.sum(mine)", ("tests/test_planning.py", "-k", "larger_plans and pallas")),
    Mutant("pallas plan: -1 slots not last", "backends/pallas_prepare.py", "(bucket == experts) | hotter", "hotter", ("tests/test_planning.py", "-k", "pallas_plan_equals")),
    Mutant("pallas plan: end of a fill", "backends/pallas_prepare.py", "mask=place < end)", "mask=place < end - 1)", ("tests/test_planning.py", "-k", "larger_plans and pallas")),
    Mutant("pallas: token not clamped", "backends/pallas_prepare.py", "> 0x600000)", "> 0x7FFFFF)", ("tests/test_fp8.py", "-k", "pallas")),
    Mutant("pallas: NaN token not marked", "backends/pallas_prepare.py", "jnp.where(jnp.max(not_finite) > 0, jnp.nan, scale)", "scale", ("tests/test_fp8.py", "-k", "pallas")),
    Mutant("pallas half tail: not multiplied", PALLAS, "pl.when(half_tall)", "pl.when(expert < -1)", half_tails("pallas-triton")),
    Mutant("pallas half tail: taken for a slot too many", PALLAS, "[row * block_m + head + half] < slots", "[row * block_m + head + half + (half > 0)] < slots", half_tails("pallas-triton")),
    Mutant("pallas half tail: left out once more", PALLAS, "short = short & jnp.logical_not(half_tall)", "short = short & half_tall", half_tails("pallas-triton")),
    # The Pallas kernel, Mosaic GPU lowering
    Mutant("mosaic: skipped tile", MOSAIC, "lax.div(items - cluster", "lax.div(items - 1 - cluster", gemm("pallas-mosaic", "ragged and fp16 and row")),
    Mutant("mosaic: wrong expert", MOSAIC, "part, expert_gmem[row], x_row", "part, expert_gmem[row * 0], x_row", gemm("pallas-mosaic", "ragged and fp16 and row")),
    Mutant("mosaic: K step dropped", MOSAIC, "if parts > 1 else k_steps", "if parts > 1 else k_steps - 1", gemm("pallas-mosaic", "ragged and fp16 and row")),
    Mutant("mosaic: stage refilled before it is read", MOSAIC, "plgpu.barrier_wait(freed.at[stage])\n                barrier =", "barrier =", gemm("pallas-mosaic", "ragged and fp16 and row")),
    Mutant("mosaic: warp-groups take each other's channels", MOSAIC, "w_smem.at[stage, c, pl.ds(channel, group_n)]", "w_smem.at[stage, c, pl.ds((sharers - 1) * group_n - channel, group_n)]", ("tests/test_mosaic.py", "-k", "tall_tiles_of and fp16")),
    Mutant("mosaic: every chunk of y at the first's place", MOSAIC, "pl.ds(tile.row * height + first, rows)", "pl.ds(tile.row * height, rows)", ("tests/test_mosaic.py", "-k", "tall_tiles_of and fp16")),
    Mutant("mosaic: turns mixed up", MOSAIC, "i = turn + step * every", "i = step * every", ("tests/test_mosaic.py", "-k", "groups_in_turns and fp16-row")),
    Mutant("mosaic: dropped channel scale", MOSAIC, "if w_scale_gmem is not None and not block_scaled:", "if False:", gemm("pallas-mosaic", "ragged and w8a16-channel")),
    Mutant("mosaic: block scale row wrong", MOSAIC, "lax.div(n, SCALE_BLOCK)", "lax.div(n, 2 * SCALE_BLOCK)", gemm("pallas-mosaic", "scale-blocks and w8a8-block")),
    Mutant("mosaic: dropped row scale", MOSAIC, "if row_scale_gmem is not None:", "if False:", gemm("pallas-mosaic", "ragged and fp16 and row")),
    Mutant("mosaic: every part reads the first", MOSAIC, "return tile.part * steps_per_part if", "return tile.part * 0 if", ("tests/test_mosaic.py", "-k", "split_k and ragged")),
    Mutant("mosaic split: sums of other rows added", "backends/pallas_triton_rows.py", "ref[\"position\"][slot]", "ref[\"position\"][0]", ("tests/test_mosaic.py", "-k", "split_k and ragged")),
    Mutant("mosaic: box too short", MOSAIC, "(rows > h)", "(rows > h + 1)", ("tests/test_mosaic.py", "-k", "boxes")),
    Mutant("mosaic: token of a tile wrong", "backends/mosaic_rows.py", "rows - 1) * TOKENS + lax.div(slot, problem.top_k)", "rows - 1) * TOKENS", ("tests/test_mosaic.py", "-k", "one_box and minus-one")),
    Mutant("mosaic: rows of x where no box begins", "backends/mosaic_rows.py", "begin = first - shared + before if", "begin = first + before if", ("tests/test_mosaic.py", "-k", "find_the_rows")),
    Mutant("mosaic: a shared group's last rows not multiplied", "backends/mosaic_rows.py", "shared + jnp.minimum(own_count", "jnp.minimum(own_count", ("tests/test_mosaic.py", "-k", "find_the_rows")),
    Mutant("mosaic: another expert's rows of a shared group", "backends/mosaic_rows.py", "first_position = first_row * block_m + shared", "first_position = first_row * block_m", gemm("pallas-mosaic", "ragged and fp16 and row")),
    Mutant("mosaic: row scales where no slot is", "backends/mosaic_rows.py", "scatter(ref[\"row_scale\"], position, scale, mine)", "scatter(ref[\"row_scale\"], position + 1, scale, mine)", ("tests/test_mosaic.py", "-k", "find_the_rows")),
    Mutant("mosaic: another token's row of x", "backends/mosaic_rows.py", "lax.div(ref[\"slot_of\"][row], problem.top_k)", "ref[\"slot_of\"][row]", gemm("pallas-mosaic", "many-rows and fp16 and row")),
    Mutant("mosaic: the last columns of x not copied", "backends/mosaic_rows.py", "(token, k), k < size)", "(token, k), k < size - 1)", ("tests/test_mosaic.py", "-k", "find_the_rows")),
    Mutant("mosaic: an active expert too few", "backends/mosaic_rows.py", "active = jnp.sum(opens", "active = -1 + jnp.sum(opens", ("tests/test_mosaic.py", "-k", "active_experts")),
    Mutant("mosaic: token scales of the box dropped", "backends/mosaic_rows.py", "ref[\"row_scale\"][row] = scale", "ref[\"row_scale\"][row] = jnp.float32(1)", ("tests/test_mosaic.py", "-k", "one_box and minus-one")),
    Mutant("mosaic: two experts share rows", "backends/mosaic_rows.py", "jnp.minimum(rows, GROUP) * experts - every", "rows * 0 - every", ("tests/test_mosaic.py", "-k", "lie_together")),
    Mutant("mosaic: slots without an expert take rows", "backends/mosaic_rows.py", "(every < experts) & ((bucket == experts) | earlier)", "(bucket == experts) | earlier", ("tests/test_mosaic.py", "-k", "lie_together")),
    Mutant("mosaic: the highest numbers first", "backends/mosaic_rows.py", "jnp.minimum(rows, GROUP) * experts - every", "jnp.minimum(rows, GROUP) * experts + every", ("tests/test_mosaic.py", "-k", "lie_together")),
    Mutant("mosaic: an expert without slots clears another's scales", "backends/mosaic_rows.py", "last | (own_count == 0), 0,", "last, 0,", ("tests/test_mosaic.py", "-k", "find_the_rows")),
    Mutant("mosaic: too few rows of x", "backends/mosaic_rows.py", "16 * problem.slots // 9", "15 * problem.slots // 9", ("tests/test_mosaic.py", "-k", "lie_together")),
    Mutant("mosaic: another token's row gathered", MOSAIC, "slot = jnp.maximum(slot_gmem[scale_row(tile) + r], 0)", "slot = jnp.maximum(slot_gmem[scale_row(tile)], 0)", ("tests/test_mosaic_threads.py", "-k", "gathered_rows and many-rows and bf16")),
    Mutant("mosaic: a slot's row gathered", MOSAIC, "x_gmem[lax.div(slot, jnp.int32(problem.top_k)), k_slice]", "x_gmem[slot // problem.slots, k_slice]", ("tests/test_mosaic_threads.py", "-k", "gathered_rows and many-rows and bf16")),
    Mutant("mosaic: gathered rows of the group before", "backends/mosaic_rows.py", "        shared = jnp.zeros_like(shared)\n", "        pass\n", ("tests/test_mosaic.py", "-k", "find_the_rows")),
    Mutant("mosaic: the last rows gathered are not told of", MOSAIC, "for pending in reversed(range(lag)):", "for pending in reversed(range(1, lag)):", ("tests/test_mosaic_threads.py", "-k", "ring_comes_round")),
    Mutant("mosaic: told of too late for the ring", MOSAIC, "min(stages // 2, stages - 2)", "stages - 1", ("tests/test_mosaic_threads.py", "-k", "ring_comes_round")),
    Mutant("mosaic: told of rows that are not there for wgmma", THREADS, " fence.proxy.async.shared::cta;", "", ("tests/test_mosaic_threads.py", "-k", "ring_comes_round")),
    Mutant("mosaic: rows gathered though they stay in L2", "backends/mosaic_config.py", "and low and sorted_bytes > KEPT_IN_L2", "and low", ("tests/test_mosaic_threads.py", "-k", "would_not_keep")),
    Mutant("mosaic: tall tiles gathered", "backends/mosaic_config.py", "GATHERED_ROWS = 48", "GATHERED_ROWS = 256", ("tests/test_mosaic_threads.py", "-k", "would_not_keep")),
    Mutant("mosaic: gathers without the registers", "backends/mosaic_config.py", " and registers_of_thread(problem, config) <= REGISTERS_OF_THREE\n    return not", "\n    return not", ("tests/test_mosaic_threads.py", "-k", "trades_registers")),
    Mutant("mosaic: a sorted copy counts where rows are gathered", "backends/mosaic_config.py", "rows = problem.tokens if gathers(problem, config) else problem.slots", "rows = problem.slots", ("tests/test_mosaic.py", "-k", "little_else_is_in_l2")),
    Mutant("mosaic: rows of y to the next slot", MOSAIC, "store_row(slot, slot >= 0, r)", "store_row(jnp.minimum(slot + 1, problem.slots - 1), slot >= 0, r)", gemm("pallas-mosaic", "many-rows and fp16 and row")),
    Mutant("mosaic: a token's row to the wrong one of its slots", MOSAIC, "(ids_gmem[slot] == tile.expert), r)", "(ids_gmem[slot] != tile.expert), r)", ("tests/test_mosaic.py", "-k", "one_box and repeated")),
    Mutant("mosaic: rows behind the last token stored", MOSAIC, "(first + r < problem.tokens) & (ids_gmem", "(ids_gmem", ("tests/test_mosaic.py", "-k", "one_box and repeated")),
    Mutant("mosaic: slots of -1 keep what was there", MOSAIC, "pl.when((ids_gmem[slot] < 0) |", "pl.when((ids_gmem[slot] < -1) |", gemm("pallas-mosaic", "some-minus-one")),
    Mutant("mosaic: slots of unknown experts keep what was there", MOSAIC, "| (ids_gmem[slot] >= problem.experts))(store_zeros)", ")(store_zeros)", gemm("pallas-mosaic", "unchecked")),
    Mutant("mosaic: a slot a second time", "backends/mosaic_rows.py", "fill(ref[\"row_slot\"], first_position + jnp.where(last, 0, own_count), end_row * block_m, -1)", "fill(ref[\"row_slot\"], first_position + jnp.where(last, 0, own_count), end_row * block_m, 0)", ("tests/test_mosaic.py", "-k", "find_the_rows")),
    Mutant("mosaic words: x in pairs' order", "backends/mosaic_config.py", "WORD, WORDS_OF = 4, 16", "WORD, WORDS_OF = 2, 16", ("tests/test_mosaic_threads.py", "-k", "read_by_words or order_of_words")),
    Mutant("mosaic words: x in its own order", "backends/mosaic_rows.py", "return WORDS_OF if reads_words(problem, config) else 0", "return 0", ("tests/test_mosaic_threads.py", "-k", "order_of_words")),
    Mutant("mosaic words: also where x is not scaled", "backends/mosaic_config.py", "and problem.scales_x and problem.k", "and problem.k", ("tests/test_mosaic_threads.py", "-k", "one_by_one")),
    Mutant("mosaic words: weights read one by one", MOSAIC, "if not reads_words(problem, config):", "if not interpret:", ("tests/test_mosaic_threads.py", "-k", "read_by_words")),
    Mutant("mosaic: last band not cut", MOSAIC, "rows = jnp.minimum(group_m, tile_rows - first_row)", "rows = jnp.int32(group_m)", ("tests/test_tile_order.py", "-k", "pallas_equals and pallas-mosaic")),
    Mutant("mosaic columns: the first one's x for all", MOSAIC, "pl.ds(0, h), pl.ds(c * depth, depth)]", "pl.ds(0, h), pl.ds(0, depth)]", ("tests/test_mosaic.py", "-k", "no_whole_columns")),
    Mutant("mosaic columns: the first one's weights for all", MOSAIC, "columns, pl.ds(k_first + c * depth, depth)]", "columns, pl.ds(k_first, depth)]", ("tests/test_mosaic.py", "-k", "no_whole_columns")),
    Mutant("mosaic columns: a step's stage freed too early", MOSAIC, "plgpu.wgmma_wait(pieces)", "plgpu.wgmma_wait(pieces + 1)", ("tests/test_mosaic.py", "-k", "copies_of_their_own")),
    Mutant("mosaic columns: x not widened to whole ones", MOSAIC, "x_columns = round_up(k, column_width(config.block_k, problem.x_itemsize) // problem.x_itemsize)", "pass", ("tests/test_mosaic.py", "-k", "copies_of_their_own")),
    Mutant("mosaic columns: narrower ones instead", "backends/mosaic_config.py", "return next(width for width in SWIZZLES if block_k * itemsize % width == 0)", "return 32", ("tests/test_mosaic.py", "-k", "no_whole_columns or copies_of_their_own")),
    Mutant("mosaic: more slots than a mask has bits", "backends/mosaic_config.py", " and problem.top_k <= TOKEN_SLOTS", "", ("tests/test_mosaic.py", "-k", "found_by_a_mask")),
    Mutant("mosaic: no weights evicted first", "backends/mosaic_copies.py", "== WEIGHT_RANK and", "== 9 and", ("tests/test_mosaic.py", "-k", "alone_have_the_policy and one-column")),
    Mutant("mosaic: x evicted first as well", "backends/mosaic_copies.py", "== WEIGHT_RANK and", ">= 2 and", ("tests/test_mosaic.py", "-k", "alone_have_the_policy and one-column")),
    Mutant("mosaic: every kernel evicts weights first", "backends/mosaic_copies.py", "_kernel_name().endswith(_SUFFIX)", "_kernel_name()", ("tests/test_mosaic.py", "-k", "alone_have_the_policy and much")),
    Mutant("mosaic: weights evicted last", "backends/mosaic_copies.py", "0x12F0", "0x14F0", ("tests/test_mosaic.py", "-k", "alone_have_the_policy and one-column")),
    Mutant("mosaic: policy of all threads' copies", "backends/mosaic_copies.py", "class _Lowering(threading.local)", "class _Lowering", ("tests/test_mosaic.py", "-k", "put_in_once")),
    Mutant("mosaic: policy put in twice", "backends/mosaic_copies.py", "async_copy.has_policy = True", "async_copy.has_policy = False", ("tests/test_mosaic.py", "-k", "put_in_once")),
    Mutant("mosaic: policy of a copy taken for every later one's", "backends/mosaic_copies.py", "            _lowering.evicts_first = before\n", "            pass\n", ("tests/test_mosaic.py", "-k", "taken_back")),
    Mutant("mosaic: a split K's sums in a ref of JAX's", MOSAIC, "return pl.run_state(lambda y: kernel(*operands, y))(jnp.full(y_type.shape, before, y_type.dtype))", "y = jax.new_ref(jnp.full(y_type.shape, before, y_type.dtype)); kernel(*operands, y); return jax.freeze(y)", ("tests/test_mosaic.py", "-k", "callers_jit and atomic-fp32")),
    Mutant("mosaic: y counts for nothing in L2", "backends/mosaic_config.py", "problem.write_bytes() // 2", "0", ("tests/test_mosaic.py", "-k", "little_else_is_in_l2")),
    Mutant("mosaic: unknown expert not zeroed", MOSAIC, "(topk_ids >= 0) & (topk_ids < problem.experts)", "(topk_ids >= 0)", ("tests/test_mosaic.py", "-k", "put_in_place_by_xla and unchecked")),
    Mutant("mosaic: -1 rows not zeroed", MOSAIC, "has_expert = (topk_ids >= 0) &", "has_expert = (topk_ids >= -1) &", ("tests/test_mosaic.py", "-k", "put_in_place_by_xla and some-minus-one")),
    # Clusters, which no interpreter has
    Mutant("mosaic clusters: a part left out", THREADS, "for part in range(parts):", "for part in range(parts - 1):", CLUSTERS, on_gpu=True),
    Mutant("mosaic clusters: every part to the first one's place", THREADS, "_times(_block_of_cluster(), rows * share * itemsize)", "_number(0)", CLUSTERS, on_gpu=True),
    Mutant("mosaic clusters: sums stored at the first share's channels", MOSAIC, "columns.start + member * stored_n", "columns.start", CLUSTERS, on_gpu=True),
    Mutant("mosaic clusters: parts of the next tile not waited for", MOSAIC, "lax.rem(i, jnp.int32(2)), y_gmem", "lax.rem(i + 1, jnp.int32(2)), y_gmem", CLUSTERS, on_gpu=True),
    Mutant("mosaic clusters: the parts' barrier is not waited for", THREADS, "_barrier(barrier_ref).wait_parity(odd)", "pass", CLUSTERS, on_gpu=True),
    Mutant("mosaic clusters: parts sent before others were read", MOSAIC, "plgpu.barrier_wait(parts_read.at[group])  # those of the tile before, by every block", "pass", CLUSTERS, on_gpu=True),
    Mutant("mosaic clusters: every block has the first part of K", MOSAIC, "pid, part = cluster + i * clusters, member", "pid, part = cluster + i * clusters, member * 0", CLUSTERS, on_gpu=True),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Verdict:
    """caught: pytest found failing tests; by: the first of them, or why there is none; seconds: of the run."""

    caught: bool
    by: str
    seconds: float


def copy_tree(folder: Path) -> None:
    for name in ("shared", "backends", "bench", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(ROOT / "pyproject.toml", folder)


PATIENCE = 900
"""Seconds after which a run that does not end is killed: what a fault wrote over memory can leave a process hanging."""


def run_tests(folder: Path, tests: Iterable[str]) -> tuple[int, str]:
    """pytest's exit status and output: 0 green, 1 red, -N killed by signal N (also after PATIENCE); others: no verdict."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    # Compiled kernels are cached by their source, but the cache must not grow from faulty ones.
    environment["TRITON_CACHE_DIR"] = str(folder / "triton-cache")
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": PATIENCE}
    try:
        result = subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, f"no end after {PATIENCE} s"
    return result.returncode, result.stdout + result.stderr


def judge(mutant: Mutant) -> Verdict:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_tree(folder)
        source = (folder / mutant.file).read_text()
        if source.count(mutant.old) != 1:
            return Verdict(False, f"{mutant.old!r} stands {source.count(mutant.old)} times in {mutant.file}", 0)
        (folder / mutant.file).write_text(source.replace(mutant.old, mutant.new))
        status, output = run_tests(folder, mutant.tests)
    seconds = time.monotonic() - start
    failed = re.search(r"^FAILED (?:.*/)?(\S+)(.*)$", output, re.M)
    if status == 1 and failed:
        return Verdict(True, failed[1] + failed[2][:60], seconds)
    if status < 0:
        return Verdict(True, f"killed by signal {-status}", seconds)
    lines = output.strip().splitlines() or ["no output"]
    return Verdict(False, "all green" if status == 0 else f"no verdict, status {status}: {lines[-1]}", seconds)


def green_without_fault(selections: Iterable[tuple[str, ...]]) -> list[str]:
    """Selections that are not green on the unchanged tree, with what pytest said."""
    problems = []
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_tree(Path(name))
        for tests in dict.fromkeys(selections):
            status, output = run_tests(Path(name), tests)
            if status != 0:
                problems.append(f"{' '.join(tests)}: status {status}\n{output[-1500:]}")
    return problems


def main(arguments: list[str]) -> int:
    if "--list" in arguments:
        print(*(mutant.name for mutant in MUTANTS), sep="\n")
        return 0
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in arguments if name not in known]:
        print(f"unknown mutants {unknown}; --list lists them", file=sys.stderr)
        return 2
    chosen = [known[name] for name in arguments] or list(MUTANTS)
    from tests.where import INTERPRET  # with both frameworks: not for --list

    if INTERPRET and (unjudged := [mutant for mutant in chosen if mutant.on_gpu]):
        print("no verdict without a GPU:", *(mutant.name for mutant in unjudged), sep="\n  ")
        chosen = [mutant for mutant in chosen if not mutant.on_gpu]
    problems = green_without_fault(mutant.tests for mutant in chosen)
    if problems:
        print("red without a fault, so that red would mean nothing:", *problems, sep="\n", file=sys.stderr)
        return 1
    width = max(len(mutant.name) for mutant in chosen)
    escaped = 0
    for mutant in chosen:
        verdict = judge(mutant)
        escaped += not verdict.caught
        print(
            f"{mutant.name:{width}}  {'caught ' if verdict.caught else 'ESCAPED'}  {verdict.seconds:4.0f} s  {verdict.by}",
            flush=True,
        )
    print(f"{len(chosen) - escaped} of {len(chosen)} caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
