"""Offsets past 2**31 elements. tests/test_gpu.py runs weights and outputs of that size; here are activations, and what
the compilers make of the offsets: read off PTX without a GPU, for the kernels as they are and with a fault planted.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import backends
from backends import triton_kernel, triton_launch, triton_prepare
from backends.compiled import compile_ptx
from shared.config import Config
from shared.problem import Problem
from shared.reference import element_bound
from tests.cases import VARIANTS
from tests.test_compile_only import assert_wide, config_of
from tests.test_gpu import Given, call, reference_of
from tests.where import HAS_GPU


def problem_of(variant: str, *, tokens: int, n: int, k: int, experts: int, top_k: int) -> Problem:
    dtype, layout = VARIANTS[variant]
    return Problem.of(
        dtype, scale_layout=layout or "channel", tokens=tokens, experts=experts, n=n, k=k, top_k=top_k,
        routing_weight=True,
    )  # fmt: skip


# PTX

BIG = {"tokens": 300_000, "experts": 128, "n": 4100, "k": 7208, "top_k": 2}
"""T*K, E*N*K and T*top_k*N all pass 2**31; FP8 arrays stay below 2**32 bytes, where Pallas's lowering would compute in
32 bits. The strides N, K and N*K are numbers that no tile size or scale layout has."""


def load_kernels(source: str, folder: Path) -> ModuleType:
    """A kernel file with another text. Triton reads a kernel's source from its file."""
    path = folder / "kernels_under_test.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gemm_ptx(kernels: ModuleType, problem: Problem, config: Config, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(triton_kernel, "moe_gemm_kernel", kernels.moe_gemm_kernel)
    return triton_launch.compile_only(problem, "column", config).ptx


def scale_ptx(kernels: ModuleType, problem: Problem) -> str:
    """prepare_kernel, bfloat16 to e4m3."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = triton_launch.prepare_constants(problem, 16, x_stride=problem.k)
    options = {"num_warps": constants.pop("num_warps")}
    signature = dict.fromkeys(kernels.prepare_kernel.arg_names, "*i32")
    signature |= {"x_ptr": "*bf16", "scaled_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32", "slots": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernels.prepare_kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def assert_offsets_wide(ptx: str, problem: Problem) -> None:
    """Offsets of experts (N * K), of rows of y (N), of rows of x and w (K): products of 64 bits, and there are some."""
    assert problem.tokens * problem.k > 2**31
    assert problem.slots * problem.n > 2**31
    assert problem.experts * problem.n * problem.k > 2**31
    assert_wide(ptx, problem.n * problem.k, problem.w_itemsize)
    assert_wide(ptx, problem.n, 2)
    assert_wide(ptx, problem.k, problem.x_itemsize)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        ("torch-triton", "fp16"),
        ("torch-triton", "fp8-w8a16-block"),
        ("torch-triton", "fp8-w8a8-block"),
        ("jax-triton", "fp8-w8a8-block"),
        # XLA takes ten times as long as Triton; tests/test_compile_only.py has w and y of pallas-triton by default.
        pytest.param("pallas-triton", "fp8-w8a8-block", marks=pytest.mark.slow),
        pytest.param("pallas-triton", "fp16", marks=pytest.mark.slow),
        pytest.param("pallas-triton", "fp8-w8a16-block", marks=pytest.mark.slow),
    ],
)
def test_every_offset_is_64_bit(backend: str, variant: str) -> None:
    """pallas-mosaic has no such products: TMA takes coordinates, and XLA gathers its rows."""
    problem = problem_of(variant, **BIG)
    ptx = backends.load(backend).compile_only(problem, "column", config_of(backend, variant)).ptx
    assert_offsets_wide(ptx, problem)


@pytest.mark.slow
@pytest.mark.compile_only
def test_an_ordinary_load_of_pallas_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 activations and weights between 2**31 and 2**32 bytes, loaded as Pallas does by itself."""
    from backends import pallas_triton, pallas_triton_ops

    problem = problem_of("fp8-w8a8-channel", **BIG)
    monkeypatch.setattr(pallas_triton_ops, "needs_wide_offsets", lambda ref: False)
    ptx = pallas_triton.compile_only(problem, "column", config_of("pallas-triton", "fp8-w8a8-channel")).ptx
    with pytest.raises(AssertionError, match=r"by \d+: .*lo\.s32"):
        assert_offsets_wide(ptx, problem)


FAULTS = {
    "row of x": ("token.to(tl.int64)[:, None] * x_stride", "token[:, None] * x_stride"),
    "row of y": ("y_ptr + slot.to(tl.int64)[:, None] * N", "y_ptr + slot[:, None] * N"),
    "expert": ("expert.to(tl.int64) * w_stride_e", "expert * w_stride_e"),
}


@pytest.mark.compile_only
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_an_offset_of_32_bits_is_noticed(fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with one `.to(tl.int64)` left out, compiled and judged as above; unchanged, it passes."""
    source = Path(triton_kernel.__file__).read_text()
    problem = problem_of("fp16", **BIG)
    if fault is not None:
        old, new = FAULTS[fault]
        assert source.count(old) == 1
        source = source.replace(old, new)
    ptx = gemm_ptx(load_kernels(source, tmp_path), problem, config_of("torch-triton", "fp16"), monkeypatch)
    if fault is None:
        assert_offsets_wide(ptx, problem)
    else:
        with pytest.raises(AssertionError, match=r"by \d+: .*lo\.s32"):
            assert_offsets_wide(ptx, problem)


@pytest.mark.compile_only
@pytest.mark.parametrize("faulty", [False, True])
def test_scaling_reads_rows_by_64_bit_offsets(faulty: bool, tmp_path: Path) -> None:
    source = Path(triton_prepare.__file__).read_text()
    old = "token = (program - PLANNERS).to(tl.int64)"
    assert source.count(old) == 1
    kernels = load_kernels(source.replace(old, "token = program - PLANNERS") if faulty else source, tmp_path)
    problem = problem_of("fp8-w8a8-block", **BIG)
    ptx = scale_ptx(kernels, problem)
    assert compile_ptx(ptx).spills == 0
    if faulty:
        with pytest.raises(AssertionError, match=r"lo\.s32"):
            assert_wide(ptx, problem.k, 2)
    else:
        assert_wide(ptx, problem.k, 2)


@pytest.mark.parametrize(("itemsize", "elements", "wide"), [(1, 2**31, False), (1, 2**31 + 1, True), (1, 2**32, True)])
def test_pallas_takes_64_bits_where_its_lowering_would_not(itemsize: int, elements: int, wide: bool) -> None:
    """One-byte arrays between 2**31 and 2**32 elements: e4m3 weights, and e4m3 activations."""
    from types import SimpleNamespace

    from backends.pallas_triton_ops import needs_wide_offsets

    assert needs_wide_offsets(SimpleNamespace(dtype=SimpleNamespace(itemsize=itemsize), size=elements)) is wide


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_an_expert_past_32_bit_offsets_is_refused(backend: str) -> None:
    """Inside one expert offsets may be 32-bit: N * K = 2**31 is refused, one row less is not. No memory is needed."""
    import torch

    def y_of(n: int) -> Any:
        x, ids = (
            torch.empty(1, 2**16, dtype=torch.float16, device="meta"),
            torch.empty(1, 1, dtype=torch.int32, device="meta"),
        )
        w = torch.empty(1, n, 2**16, dtype=torch.float16, device="meta")
        return backends.moe_gemm(x, w, ids, backend=backend)

    assert y_of(2**15 - 1).shape == (1, 1, 2**15 - 1)
    with pytest.raises(backends.ArgumentError, match=r"^w: got N \* K = 2147483648; allowed: below 2\*\*31"):
        y_of(2**15)


# On a GPU


@pytest.fixture
def _room() -> Iterator[None]:
    """Memory that PyTorch keeps given back, before and after."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


TOKENS, WIDTH = (600_000, 4096) if HAS_GPU else (40, 64)


def large_x(variant: str) -> Given:
    """x has T * K = 2.46e9 elements, drawn in place; -1 and every expert occur."""
    import torch

    device = "cuda" if HAS_GPU else "cpu"
    problem = problem_of(variant, tokens=TOKENS, experts=4, n=64, k=WIDTH, top_k=1)
    generator = torch.Generator(device).manual_seed(0)
    activation = getattr(torch, problem.activation)
    x = torch.empty(TOKENS, WIDTH, dtype=activation, device=device)
    for part in x.split(65_536):
        part.normal_(generator=generator)
    w = torch.randn(4, 64, WIDTH, generator=generator, device=device)
    w = w.to(torch.float8_e4m3fn if problem.is_fp8 else activation)
    w_scale = None
    if problem.w_scale_shape is not None:
        w_scale = torch.rand(problem.w_scale_shape, generator=generator, device=device) + 0.5
    ids = torch.randint(-1, 4, (TOKENS, 1), generator=generator, device=device, dtype=torch.int32)
    topk_weight = torch.rand(TOKENS, 1, generator=generator, device=device) + 0.5
    return Given(problem, x, w, ids, w_scale, topk_weight)


def windows(given: Given) -> list[slice]:
    """256 tokens at the start, where x passes 2**31 elements, where it passes 2**31 bytes, and at the end."""
    tokens, k = given.x.shape
    middles = (2**31 // k, 2**30 // k) if HAS_GPU else (tokens // 2,)
    starts = (0, *(middle - 128 for middle in middles), tokens - 256)
    return [slice(max(0, start), max(0, start) + 256) for start in starts]


def assert_windows_right(y: Any, given: Given) -> None:
    for window in windows(given):
        part = dataclasses.replace(
            given, x=given.x[window], ids=given.ids[window], topk_weight=given.topk_weight[window],
            problem=dataclasses.replace(given.problem, tokens=given.x[window].shape[0]),
        )  # fmt: skip
        expected = reference_of(part)
        rows = expected.abs().amax(dim=2, keepdim=True)
        # "not less" instead of "greater": a NaN fails
        wrong = ~((y[window].double() - expected).abs() <= element_bound(given.problem) * rows)
        assert not wrong.any(), f"{int(wrong.sum())} elements wrong in tokens {window.start} to {window.stop}"


@pytest.mark.gpu
@pytest.mark.usefixtures("_room")
@pytest.mark.parametrize("variant", ["fp16", "fp8-w8a16-channel", "fp8-w8a8-channel"])
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_activations_past_32_bit_offsets(backend: str, variant: str) -> None:
    """As it is (fp16), scaled to float16, and quantised to one byte an element: each past 2**31 elements."""
    given = large_x(variant)
    assert given.x.numel() > 2**31
    config = Config(block_m=64, block_n=64, block_k=64, num_stages=3, swap_ab=True)
    assert_windows_right(call(backend, given, "column", config), given)


def test_the_windows_notice_a_wrong_row() -> None:
    """The judgement above on the CPU, small: right values pass, one wrong element of one row does not."""
    if HAS_GPU:
        pytest.skip("the data of this file are large where there is a GPU")
    given = large_x("fp16")
    y = reference_of(given).half()
    assert_windows_right(y, given)
    token = int(np.flatnonzero(given.ids.numpy()[:, 0] >= 0)[-1])
    y[token, 0, 5] += 1
    with pytest.raises(AssertionError, match=r"^1 elements wrong"):
        assert_windows_right(y, given)
