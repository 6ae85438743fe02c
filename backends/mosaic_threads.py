"""What each thread of a warp-group does, where Pallas has no words for it: copies rows of x that lie anywhere to shared
memory, stores rows of y from there to their slots, reads weights from there by words, sends parts of sums to other
thread blocks of its cluster.

TMA reads and writes equally strided rows alone, and a tile's slots lie anywhere. A thread moves 16 bytes at a time, of
which the slot of their row and their place in the swizzled tile tell where they come from and go to. What it copies by
cp.async it sees once `commit_and_wait` has waited; that then makes it visible to wgmma, which reads by another way than
threads write (the asynchronous proxy).

Parts of sums go to other thread blocks by st.async, which tells a barrier there how many bytes have come. Who waits for
it sees them without a fence. A release at the scope of a cluster, which remote loads would need, waits until all that
the thread has stored anywhere is there for the whole GPU.

Sources: the PTX manual on cp.async, st.async, mapa and mbarrier, on the asynchronous proxy and on wgmma's shared-memory
matrix layouts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from shared.problem import ceil_div

THREADS = 128
CHUNK = 16
"""Bytes that a thread moves at a time."""
_SPLAT = plgpu.Layout.WG_SPLAT


def copy_rows(
    x: Any, row_slot: Any, target: Any, first_row: Any, first_byte: jax.Array, rows: int, top_k: int, transforms: Any,
) -> None:  # fmt: skip
    """Start copying columns of x (T, K), from byte `first_byte` of a row on, to target (height, block_k): its first
    `rows` rows, a multiple of 8, are those of the tokens of the slots row_slot[first_row:]; a negative slot stands for
    any token. Past K come zeros.

    transforms: of target, tiles of 8 rows and a swizzle. All threads of a warp-group call this.
    """
    row_bytes, block_bytes = (array.shape[-1] * x.dtype.itemsize for array in (x, target))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(transforms), _SPLAT, _SPLAT))
    def copy(ctx: Any, x_ref: Any, slot_ref: Any, target_ref: Any, first_row: Any, first_byte: Any) -> None:
        del ctx
        x_base = _address(x_ref)
        first_row, first_byte = first_row.registers.item(), first_byte.registers.item()
        for row, column, inside in _chunks(rows, block_bytes):
            slot = arith.maxsi(_slot_of(slot_ref, arith.addi(first_row, row)), _number(0))
            token = arith.divui(slot, _number(top_k))
            byte = arith.addi(first_byte, column)
            left = arith.minsi(arith.maxsi(arith.subi(_number(row_bytes), byte), _number(0)), _number(CHUNK))
            source = arith.addi(x_base, arith.addi(_times(_wide(token), row_bytes), _wide(byte)))
            source = arith.select(arith.cmpi(arith.CmpIPredicate.sgt, left, _number(0)), source, x_base)
            place = _swizzled(target_ref, row, column, block_bytes, transforms)
            copying = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
            utils.inline_ptx(copying, place, source, left, predicate=inside, has_side_effects=True)

    copy(x, row_slot, target, first_row, first_byte)


def load_words(source: Any, transforms: Any) -> jax.Array:
    """Weights source (channels, block_k), e4m3, as float16 in registers, as wgmma's left operand lies there: but each
    thread reads four at a time, so of 16 values of K they come as 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15.

    transforms: of source, tiles of 8 rows and a swizzle.
    """
    of = plgpu.ShapeDtypeStruct(source.shape, jnp.float16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), return_type=of)
    def load(ctx: Any, ref: Any) -> Any:
        del ctx
        words = mgpu.FragmentedArray.load_tiled(
            ref, swizzle=transforms[1].swizzle, layout=fragmented_array.WGMMA_LAYOUT_8BIT
        )
        wide = words.astype(ir.F16Type.get())
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(tuple(wide.shape)), dtype=object)
        for place, four in np.ndenumerate(wide.registers):  # [row tile, 16 columns, ., ., 8 rows, ...]
            for half in range(2):
                there = (place[0], 2 * place[1] + half, *place[2:])
                registers[there] = utils.vector_slice(four, slice(2 * half, 2 * half + 2))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source)


def commit_and_wait(pending: int) -> None:
    """What this thread has started to copy becomes a group; all but the last `pending` groups are there for wgmma."""
    waiting = f"cp.async.commit_group; cp.async.wait_group {pending}; fence.proxy.async.shared::cta;"
    plgpu.inline_mgpu()(lambda ctx: utils.inline_ptx(waiting, has_side_effects=True))()


def find_slots(
    numbers: Any, first_row: jax.Array, rows: int, channels: int, *, slots: int, top_k: int | None, expert: jax.Array,
) -> jax.Array:  # fmt: skip
    """Where `store_rows` stores rows of so many 2-byte channels, for each chunk that a thread stores: (chunks,) int32,
    the thread's own in its registers.

    top_k None: numbers (R * height,) are the slots of tile rows' rows, from first_row on those of these rows; the
    chunk's slot, negative: none. Else numbers are topk_ids (S,), rows are tokens; a mask, bit i for a token's i-th
    slot where that has the expert. slots: S.
    """
    tile_bytes = 2 * channels
    shape = (THREADS * ceil_div(rows * tile_bytes // CHUNK, THREADS),)
    of = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, _SPLAT), return_type=of)
    def find(ctx: Any, number_ref: Any, first_row: Any, expert: Any) -> Any:
        del ctx
        first_row, expert = first_row.registers.item(), expert.registers.item()
        layout = fragmented_array.WGStridedFragLayout(shape, vec_size=1)
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for i, (row, _, inside) in enumerate(_chunks(rows, tile_bytes, _thread_anew())):
            if top_k is None:
                found = _slot_of(number_ref, arith.addi(first_row, row))
                nothing = _number(-1)
            else:
                found = nothing = _number(0)
                for t in range(top_k):
                    slot = arith.minsi(arith.addi(_times(row, top_k), _number(t)), _number(slots - 1))
                    own = arith.cmpi(arith.CmpIPredicate.eq, _slot_of(number_ref, slot), expert)
                    is_token = arith.cmpi(arith.CmpIPredicate.slt, row, _number(slots // top_k))
                    bit = arith.select(arith.andi(own, is_token), _number(1 << t), _number(0))
                    found = arith.ori(found, bit)
            if inside is not None:
                found = arith.select(inside, found, nothing)
            registers[i] = vector.broadcast(ir.VectorType.get((1,), _i32()), found)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return find(numbers, first_row, expert)


def store_rows(
    source: Any, y: Any, found: jax.Array, first_row: jax.Array, first_column: jax.Array, rows: int, transforms: Any, *,
    top_k: int | None,
) -> None:  # fmt: skip
    """The first `rows` rows of source (rows, channels) to rows of y (S, N), from channel `first_column` on. Channels
    past N, a multiple of 8, go to nowhere.

    found: of `find_slots`; with top_k, rows are tokens, from first_row on. transforms: of source, tiles of 8 rows and a
    swizzle. All threads of a warp-group call this, which have written it.
    """
    itemsize = y.dtype.itemsize
    row_bytes, tile_bytes = y.shape[1] * itemsize, source.shape[-1] * itemsize
    layout = plgpu.Layout.WG_STRIDED(found.shape, vec_size=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType(), layout, _SPLAT, _SPLAT))
    def store(ctx: Any, source_ref: Any, y_ref: Any, found: Any, first_row: Any, first_column: Any) -> None:
        del ctx
        utils.warpgroup_barrier()  # what others have written is there
        y_base = _address(y_ref)
        first_row, first_byte = first_row.registers.item(), _times(first_column.registers.item(), itemsize)
        for (row, column, _), register in zip(_chunks(rows, tile_bytes, _thread_anew()), found.registers, strict=True):
            number = vector.extract(register, [], [0])
            byte = arith.addi(first_byte, column)
            inside = arith.cmpi(arith.CmpIPredicate.slt, byte, _number(row_bytes))
            place = _swizzled(source_ref, row, column, tile_bytes, transforms)
            values = utils.inline_ptx(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", place, result_types=[_i32()] * 4, has_side_effects=True
            )
            _store_chunk(values, y_base, row_bytes, byte, number, arith.addi(first_row, row), inside, top_k)

    store(source, y, found, first_row, first_column)


def start_barrier(barrier: Any) -> None:
    """An mbarrier in shared memory, (2,) int32, for `send_parts`: one arrival and the bytes it expects end a phase.
    Afterwards other thread blocks may be told that they can send. All threads of a warp-group call this."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def start(ctx: Any, barrier_ref: Any) -> None:
        del ctx
        one = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        nvvm.mbarrier_init(utils.memref_ptr(barrier_ref), _number(1), predicate=one)
        utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        utils.warpgroup_barrier()

    start(barrier)


def send_parts(sums: jax.Array, target: Any, barrier: Any, parts: int) -> None:
    """One part of K of float32 sums (channels, rows), of layout WGMMA_TRANSPOSED, to the `parts` thread blocks of the
    cluster, whose rank says which part is theirs. Each gets an equal share of the channels, for `store_sums`.

    target (rows or more, channels) float32: what this warp-group gets of all blocks, (parts, rows, channels / parts)
    from its start on, and at the same place in each block. barrier: of `start_barrier`; its phase completes when all
    parts have come. All threads of a warp-group call this, once that of every block in the cluster has read its target.
    """
    (channels, rows), itemsize = sums.shape, 4
    share = channels // parts

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_TRANSPOSED, plgpu.RefType(), plgpu.RefType()))
    def send(ctx: Any, sums: Any, target_ref: Any, barrier_ref: Any) -> None:
        del ctx
        own_barrier = _barrier(barrier_ref)
        one = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        own_barrier.arrive_expect_tx(rows * channels * itemsize, predicate=one)
        barrier = llvm.ptrtoint(_i32(), own_barrier.get_ptr())
        target = arith.addi(_shared_address(target_ref), _times(_block_of_cluster(), rows * share * itemsize))
        places = sums.layout.thread_idxs(sums.shape)
        for place, register in zip(places, sums.registers.flat, strict=True):  # two channels of a row
            channel, row = (arith.index_cast(_i32(), i) for i in place)
            block = arith.divui(channel, _number(share))
            column = arith.remui(channel, _number(share))
            there = arith.addi(target, _times(arith.addi(_times(row, share), column), itemsize))
            values = [vector.extract(register, [], [i]) for i in range(2)]
            sending = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$0], {$1, $2}, [$3];"
            there, told = (_in_block(address, block) for address in (there, barrier))
            utils.inline_ptx(sending, there, *values, told, has_side_effects=True)

    send(sums, target, barrier)


def store_sums(
    source: Any, barrier: Any, phase: jax.Array, y: Any, found: jax.Array, first_column: jax.Array, rows: int, *,
    parts: int, top_k: int | None,
) -> None:  # fmt: skip
    """Sums of the parts that `send_parts` of all blocks sent to this one, added in their order in float32, to rows of y
    (S, N), from channel `first_column` on, as by `store_rows`; with top_k, tokens from the first on.

    source, barrier: target and barrier there; phase: of the barrier, 0 or 1 in turn. All threads of a warp-group call
    this; when it returns, all have read the source.
    """
    share = source.shape[-1] // parts
    row_bytes = y.shape[1] * y.dtype.itemsize
    pair = {"float16": "f16x2", "bfloat16": "bf16x2"}[y.dtype.name]
    layout = plgpu.Layout.WG_STRIDED(found.shape, vec_size=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SPLAT, plgpu.RefType(), layout, _SPLAT))
    def store(
        ctx: Any, source_ref: Any, barrier_ref: Any, phase: Any, y_ref: Any, found: Any, first_column: Any
    ) -> None:  # fmt: skip
        del ctx
        odd = arith.cmpi(arith.CmpIPredicate.ne, phase.registers.item(), _number(0))
        _barrier(barrier_ref).wait_parity(odd)
        y_base, base = _address(y_ref), _shared_address(source_ref)
        first_byte = _times(first_column.registers.item(), y.dtype.itemsize)
        # Anew in each tile, as in `store_rows`.
        thread = utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=_i32(), has_side_effects=True)
        chunks = _chunks(rows, share * y.dtype.itemsize, thread)
        for (row, column, _), register in zip(chunks, found.registers, strict=True):
            number = vector.extract(register, [], [0])
            byte = arith.addi(first_byte, column)
            inside = arith.cmpi(arith.CmpIPredicate.slt, byte, _number(row_bytes))
            place = arith.addi(base, arith.addi(_times(row, share * 4), _times(column, 4 // y.dtype.itemsize)))
            values = []
            for half in range(2):  # of the 8 channels of a chunk: all parts of 4 at once, as registers are few
                sums: list[Any] = []
                for part in range(parts):
                    there = arith.addi(place, _number(part * rows * share * 4 + half * CHUNK))
                    loading = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
                    of_part = utils.inline_ptx(loading, there, result_types=[_f32()] * 4, has_side_effects=True)
                    sums = [arith.addf(a, b) for a, b in zip(sums, of_part, strict=True)] if part else list(of_part)
                for low, high in (sums[:2], sums[2:]):
                    values.append(utils.inline_ptx(f"cvt.rn.{pair}.f32 $0, $1, $2;", high, low, result_types=_i32()))
            _store_chunk(values, y_base, row_bytes, byte, number, row, inside, top_k)
        utils.warpgroup_barrier()

    store(source, barrier, phase, y, found, first_column)


def zero_rows(topk_ids: Any, y: Any, block: jax.Array, blocks: int, experts: int) -> None:
    """Zeros to the rows of y (S, N), N a multiple of 8, whose slot has no expert: of slots block, block + blocks, ...

    topk_ids (S,). All threads of a warp-group call this.
    """
    slots, row_bytes = topk_ids.shape[0], y.shape[1] * y.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SPLAT))
    def zero(ctx: Any, ids_ref: Any, y_ref: Any, block: Any) -> None:
        del ctx
        y_base = _address(y_ref)
        first = arith.addi(block.registers.item(), _times(_thread(), blocks))
        none = _number(0)
        every = (arith.index_cast(_index(), n) for n in (first, _number(slots), _number(blocks * THREADS)))
        for slot in scf.for_(*every):
            slot_number = arith.index_cast(_i32(), slot)
            expert = _slot_of(ids_ref, slot_number)
            unknown = arith.cmpi(arith.CmpIPredicate.uge, expert, _number(experts))
            row = arith.addi(y_base, _times(_wide(slot_number), row_bytes))
            with utils.when(unknown):
                for byte in scf.for_(*(utils.c(n, _index()) for n in (0, row_bytes, CHUNK))):
                    target = arith.addi(row, arith.index_cast(_i64(), byte))
                    storing = "st.global.v4.b32 [$0], {$1, $1, $1, $1};"
                    utils.inline_ptx(storing, target, none, has_side_effects=True)
                    scf.yield_([])
            scf.yield_([])

    zero(topk_ids, y, block)


def _store_chunk(
    values: Any, y_base: Any, row_bytes: int, byte: Any, number: Any, row: Any, inside: Any, top_k: int | None
) -> None:  # fmt: skip
    """16 bytes of a row of a tile to byte `byte` of the rows of y that `number`, of `find_slots`, names."""
    targets = [(number, arith.cmpi(arith.CmpIPredicate.sge, number, _number(0)))]
    if top_k is not None:
        first = _times(row, top_k)
        bits = [arith.andi(number, _number(1 << i)) for i in range(top_k)]
        targets = [
            (arith.addi(first, _number(i)), arith.cmpi(arith.CmpIPredicate.ne, bit, _number(0)))
            for i, bit in enumerate(bits)
        ]
    for slot, own in targets:
        target = arith.addi(y_base, arith.addi(_times(_wide(slot), row_bytes), _wide(byte)))
        storing = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        utils.inline_ptx(storing, target, *values, predicate=arith.andi(inside, own), has_side_effects=True)


def _chunks(rows: int, row_bytes: int, thread: Any = None) -> Any:
    """Of each of a thread's chunks, row, first byte in it, and whether there is such a row: None where that is certain.

    thread: its number in its block, where it is not to be asked for here.
    """
    in_row = row_bytes // CHUNK
    for start in range(0, rows * in_row, THREADS):
        chunk = arith.addi(_thread(thread), _number(start))
        inside = None
        if start + THREADS > rows * in_row:
            inside = arith.cmpi(arith.CmpIPredicate.ult, chunk, _number(rows * in_row))
            chunk = arith.select(inside, chunk, _number(0))
        yield arith.divui(chunk, _number(in_row)), _times(arith.remui(chunk, _number(in_row)), CHUNK), inside


def _swizzled(ref: Any, row: Any, column: Any, row_bytes: int, transforms: Any) -> Any:
    """Address in shared memory of byte `column`, a multiple of CHUNK, of a row.

    Tiles of 8 rows and one swizzle's width lie one behind the other. In each, chunks change places by the address bits
    from the 7th on.
    """
    width = transforms[1].swizzle
    tile = arith.addi(_times(arith.divui(row, _number(8)), row_bytes // width), arith.divui(column, _number(width)))
    within = arith.addi(_times(arith.remui(row, _number(8)), width), arith.remui(column, _number(width)))
    moved = arith.andi(arith.shrui(within, _number(7)), _number(width // CHUNK - 1))
    within = arith.xori(within, _times(moved, CHUNK))
    return arith.addi(_shared_address(ref), arith.addi(_times(tile, 8 * width), within))


def _slot_of(ref: Any, place: Any) -> Any:
    """ref[place], int32. Not by ld.global.nc, which the compiler may move ahead, where its result takes registers."""
    address = arith.addi(_address(ref), _wide(_times(place, 4)))
    return utils.inline_ptx("ld.global.b32 $0, [$1];", address, result_types=_i32(), has_side_effects=True)


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(_i64(), utils.memref_ptr(ref))


def _shared_address(ref: Any) -> Any:
    return llvm.ptrtoint(_i32(), utils.memref_ptr(ref))


def _barrier(ref: Any) -> Any:
    """Mosaic's handle of an mbarrier in shared memory whose phases are counted elsewhere."""
    phases: Any = None
    return utils.BarrierRef(utils.memref_ptr(ref), _number(0), phases, 1)


def _block_of_cluster() -> Any:
    """This thread block's rank in its cluster."""
    return utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=_i32())


def _in_block(address: Any, block: Any) -> Any:
    """What lies at this shared-memory address in a thread block of the cluster, by its rank."""
    return utils.inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, block, result_types=_i32())


def _thread(thread: Any = None) -> Any:
    """This thread's number in its warp-group, from that in its block."""
    return arith.andi(utils.thread_idx() if thread is None else thread, _number(THREADS - 1))


def _thread_anew() -> Any:
    """Of this thread in its block. Read anew in each tile: places that a loop keeps in registers take those of sums."""
    return utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=_i32(), has_side_effects=True)


def _number(value: int) -> Any:
    return utils.c(value, _i32())


def _times(a: Any, value: int) -> Any:
    return arith.muli(a, utils.c(value, a.type))


def _wide(a: Any) -> Any:
    return arith.extsi(_i64(), a)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _i64() -> Any:
    return ir.IntegerType.get_signless(64)


def _f32() -> Any:
    return ir.F32Type.get()


def _index() -> Any:
    return ir.IndexType.get()
