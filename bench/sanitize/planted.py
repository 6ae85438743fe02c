"""Kernels with one fault each, for the sanitizers to be tried on: a check that misses them is no check.

Each is run between two launches of a faultless kernel, so that it also shows whether a finding is put down to the
launch that it belongs to. One block of THREADS threads, and as many int32 in `data`.
"""

from __future__ import annotations

import triton
import triton.language as tl

THREADS = 100
"""400 bytes of data: no size that an allocator with size classes, which would hide an overrun, gives out."""
FAULTLESS = "planted_nothing"

SOURCE = """
extern "C" __global__ void planted_nothing(int* data) {
    data[threadIdx.x] = threadIdx.x;
}

// The last thread writes one element past the end.
extern "C" __global__ void planted_overrun(int* data) {
    data[threadIdx.x + 1] = threadIdx.x;
}

// Reads what no one has written: data comes straight from the allocator.
extern "C" __global__ void planted_unwritten(int* data) {
    data[threadIdx.x] = data[THREADS - 1 - threadIdx.x] + 1;
}

// Another warp's element of shared memory, without a barrier between its write and this read.
extern "C" __global__ void planted_race(int* data) {
    __shared__ int shared[THREADS];
    shared[threadIdx.x] = threadIdx.x;
    data[threadIdx.x] = shared[THREADS - 1 - threadIdx.x];
}

// A barrier of the whole block that half of its first warp's threads pass by. (Where whole warps pass by it, none waits
// for them once they have ended, and synccheck of 2025.3 says nothing.)
extern "C" __global__ void planted_barrier(int* data) {
    if (threadIdx.x >= 16) __syncthreads();
    data[threadIdx.x] = threadIdx.x;
}
"""
SOURCE = SOURCE.replace("THREADS", str(THREADS))


@triton.jit
def planted_triton_overrun(data, out, length: tl.constexpr, padded: tl.constexpr, distance: tl.constexpr):
    """The overrun by a Triton kernel, for an allocation of JAX's: it writes from out[distance] on.

    Megabytes past the end: XLA rounds sizes up before it allocates, and one element past 100 was in its padding.
    """
    offsets = tl.arange(0, padded)
    tl.store(out + distance + offsets, tl.load(data + offsets, mask=offsets < length), mask=offsets < length)


def run(name: str) -> None:
    """Launch the kernel of this name and wait for it. Raises what the framework raises."""
    if name == "planted_triton_overrun":
        _run_in_jax()
        return
    if name == "control_bulk_store":
        _store_in_bulk()
        return
    import torch

    kernel = torch.cuda._compile_kernel(SOURCE, name)  # NVRTC, which PyTorch brings along: no nvcc needed
    data = torch.empty(THREADS, dtype=torch.int32, device="cuda")
    if name != "planted_unwritten":
        data.copy_(torch.arange(THREADS, dtype=torch.int32))
    kernel((1, 1, 1), (THREADS, 1, 1), [data])
    torch.cuda.synchronize()


def _run_in_jax() -> None:
    import jax
    import jax.numpy as jnp
    import jax_triton
    import numpy as np

    data = jax.device_put(np.arange(THREADS, dtype=np.int32))
    out = jax_triton.triton_call(
        data=data,
        kernel=planted_triton_overrun,
        grid=1,
        out_type=[jax.ShapeDtypeStruct((THREADS,), jnp.int32)],
        name="planted_triton_overrun",
        length=THREADS,
        padded=128,
        distance=1 << 22,
    )
    jax.block_until_ready(out)


def _store_in_bulk() -> None:
    """Nothing is wrong here: TMA writes every element of an array, then a kernel of XLA's reads it."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(source, target, buffer, filled):
        plgpu.copy_gmem_to_smem(source, buffer, filled)
        plgpu.barrier_wait(filled)
        plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    shape = (64, 64)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=[plgpu.SMEM(shape, jnp.float32), plgpu.Barrier()],
        kernel_name="control_bulk_store",
    )
    jax.block_until_ready(jnp.sum(kernel(jnp.ones(shape, jnp.float32))))
