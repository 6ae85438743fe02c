"""What each thread of a warp-group does, where Pallas has no words for it: copies rows of x that lie anywhere to shared
memory, stores rows of y from there to their slots, reads weights from there by words.

TMA reads and writes equally strided rows alone, and a tile's slots lie anywhere. A thread moves 16 bytes at a time, of
which the slot of their row and their place in the swizzled tile tell where they come from and go to. What it copies by
cp.async it sees once `commit_and_wait` has waited; that then makes it visible to wgmma, which reads by another way than
threads write (the asynchronous proxy).

Sources: the PTX manual on cp.async, on the asynchronous proxy and on wgmma's shared-memory matrix layouts.
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
from jaxlib.mlir.dialects import arith, llvm, scf

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


def store_rows(
    source: Any, y: Any, numbers: Any, first_row: jax.Array, first_column: jax.Array, rows: int, transforms: Any, *,
    top_k: int | None, expert: jax.Array,
) -> None:  # fmt: skip
    """The first `rows` rows of source (rows, channels) to rows of y (S, N), from channel `first_column` on. Channels
    past N, a multiple of 8, go to nowhere.

    top_k None: numbers (R * height,) are the slots of tile rows' rows, from first_row on those of these rows; negative:
    none. Else they are topk_ids (S,), rows are tokens, and a token's go to those of its slots that have the expert.
    transforms: of source, tiles of 8 rows and a swizzle. All threads of a warp-group call this, which have written it.
    """
    itemsize = y.dtype.itemsize
    slots, row_bytes, tile_bytes = y.shape[0], y.shape[1] * itemsize, source.shape[-1] * itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType(), plgpu.RefType(), _SPLAT, _SPLAT, _SPLAT))
    def store(
        ctx: Any, source_ref: Any, y_ref: Any, number_ref: Any, first_row: Any, first_column: Any, expert: Any
    ) -> None:
        del ctx
        utils.warpgroup_barrier()  # what others have written is there
        y_base = _address(y_ref)
        first_row, first_byte = first_row.registers.item(), _times(first_column.registers.item(), itemsize)
        expert = expert.registers.item()

        def slots_of(row: Any) -> list[tuple[Any, Any]]:
            """(slot, whether this row is its)"""
            if top_k is None:
                slot = _slot_of(number_ref, arith.addi(first_row, row))
                return [(slot, arith.cmpi(arith.CmpIPredicate.sge, slot, _number(0)))]
            found = []
            for i in range(top_k):
                slot = arith.minsi(arith.addi(_times(row, top_k), _number(i)), _number(slots - 1))
                own = arith.cmpi(arith.CmpIPredicate.eq, _slot_of(number_ref, slot), expert)
                is_token = arith.cmpi(arith.CmpIPredicate.slt, row, _number(slots // top_k))
                found.append((slot, arith.andi(own, is_token)))
            return found

        # Anew in each tile: places that a loop keeps in registers take those of the sums.
        thread = utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=_i32(), has_side_effects=True)
        # All slots first, whose loads take longest.
        chunks = [(*chunk, slots_of(chunk[0])) for chunk in _chunks(rows, tile_bytes, thread)]
        for row, column, inside, found in chunks:
            byte = arith.addi(first_byte, column)
            wanted = arith.cmpi(arith.CmpIPredicate.slt, byte, _number(row_bytes))
            if inside is not None:
                wanted = arith.andi(wanted, inside)
            place = _swizzled(source_ref, row, column, tile_bytes, transforms)
            values = utils.inline_ptx(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", place, result_types=[_i32()] * 4, has_side_effects=True
            )
            for slot, own in found:
                target = arith.addi(y_base, arith.addi(_times(_wide(slot), row_bytes), _wide(byte)))
                storing = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
                utils.inline_ptx(storing, target, *values, predicate=arith.andi(wanted, own), has_side_effects=True)

    store(source, y, numbers, first_row, first_column, expert)


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
    base = llvm.ptrtoint(_i32(), utils.memref_ptr(ref))
    return arith.addi(base, arith.addi(_times(tile, 8 * width), within))


def _slot_of(ref: Any, place: Any) -> Any:
    """ref[place], int32. Not by ld.global.nc, which the compiler may move ahead, where its result takes registers."""
    address = arith.addi(_address(ref), _wide(_times(place, 4)))
    return utils.inline_ptx("ld.global.b32 $0, [$1];", address, result_types=_i32(), has_side_effects=True)


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(_i64(), utils.memref_ptr(ref))


def _thread(thread: Any = None) -> Any:
    """This thread's number in its warp-group, from that in its block."""
    return arith.andi(utils.thread_idx() if thread is None else thread, _number(THREADS - 1))


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


def _index() -> Any:
    return ir.IndexType.get()
