"""Every backend's kernel compiled for sm_90 with no device: registers, spills, shared memory, instructions, offsets.

A covering set instead of the product: each backend x dtype x scale layout, with the orders in turn. The problem's
numbers are chosen so that its offsets pass 2**31 and its tails are ragged.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest

import backends
from backends.compiled import Compiled
from shared import models
from shared.config import REDUCTIONS, Config
from shared.orders import ORDERS
from shared.problem import Problem
from tests.cases import VARIANTS

pytestmark = pytest.mark.compile_only

SHARED_MEMORY = 232448  # bytes that a thread block can have on Hopper
REGISTERS = 65536  # of one SM


def problem_of(variant: str) -> Problem:
    """E * N * K and T * top_k * N pass 2**31; N = 4100 and K = 7200 are no multiples of a tile.

    FP8 weights with channel scales are between 2**31 and 2**32 bytes, the others past 2**32: Pallas has a limit there.
    """
    dtype, layout = VARIANTS[variant]
    return Problem.of(
        dtype,
        scale_layout=layout or "channel",
        tokens=70_000,
        experts=100 if layout == "channel" else 256,
        n=4100,
        k=7200,
        top_k=8,
        routing_weight=True,
    )


def config_of(backend: str, variant: str) -> Config:
    """Decode tiles as they are used: two bytes or 256 FP8 values deep; widened weights on the right in Triton."""
    dtype, layout = VARIANTS[variant]
    block_k = 256 if dtype == "fp8-w8a8" and layout == "channel" else 128
    return Config(block_k=block_k, swap_ab=dtype != "fp8-w8a16" or backend == "pallas-mosaic")


@functools.cache
def compiled(backend: str, problem: Problem, order: str, config: Config) -> Compiled:
    refusal = backends.load(backend).unsupported(problem, config)
    assert refusal is None, refusal
    return backends.load(backend).compile_only(problem, order, config)


_HALF_A_MINUTE = (("pallas-triton", "fp8-w8a16-block"), ("pallas-triton", "fp8-w8a8-channel"))
"""Compiled only when asked for: the other two FP8 variants have their instructions and their scales between them."""
_SPARED = (*_HALF_A_MINUTE, ("pallas-mosaic", "bf16"))


def in_turn() -> list[object]:
    return [
        pytest.param(
            backend,
            variant,
            ORDERS[(i + j) % len(ORDERS)],
            id=f"{backend}-{variant}-{ORDERS[(i + j) % len(ORDERS)]}",
            marks=(pytest.mark.slow,) if (backend, variant) in _SPARED else (),
        )
        for i, backend in enumerate(backends.BACKENDS)
        for j, variant in enumerate(VARIANTS)
        # XLA takes ten times as long as Triton; for it, bf16 differs from fp16 in the name of the instruction only.
        if (backend, variant) != ("pallas-triton", "bf16")
    ]


def order_of(backend: str, variant: str) -> str:
    """The order that `test_compiles` takes, so that what it compiled is found."""
    return next(p.values[2] for p in in_turn() if p.values[:2] == (backend, variant))  # type: ignore[attr-defined]


def assert_fits(code: Compiled, config: Config) -> None:
    assert code.spills == 0, f"{code.spills} bytes of registers spilled"
    if code.sass is not None:
        local = re.findall(r"\b(?:LDL|STL)\b.*", code.sass)
        assert not local, f"local memory used: {local[:2]}"
    assert 0 < code.registers <= 255
    assert code.registers * 32 * config.num_warps <= REGISTERS
    assert 0 < code.shared_bytes <= SHARED_MEMORY


def matrix_instructions(ptx: str) -> set[tuple[str, str]]:
    """("wgmma" or "mma", operand types), for each tensor-core instruction of the PTX."""
    found = re.findall(r"\b(wgmma\.mma_async|mma)\.sync\.aligned\.([\w.]+)", ptx)
    result = set()
    for instruction, modifiers in found:
        types = [part for part in modifiers.split(".") if re.fullmatch(r"f16|bf16|f32|e4m3|e5m2|tf32", part)]
        operands = types[1:3]  # wgmma: accumulator, a, b; mma: accumulator, a, b, accumulator
        result.add((instruction.removesuffix(".mma_async"), ".".join(operands)))
    return result


@pytest.mark.parametrize(("backend", "variant", "order"), in_turn())
def test_compiles(backend: str, variant: str, order: str, record_property: pytest.RecordProperty) -> None:
    config = config_of(backend, variant)
    code = compiled(backend, problem_of(variant), order, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", code.shared_bytes)
    assert_fits(code, config)

    # One kind of tensor-core instruction, and the right one: fp8-w8a8 must not be widened to float16, and fp8-w8a16
    # multiplies in float16, into which hardware widens e4m3.
    operands = {"fp16": "f16.f16", "bf16": "bf16.bf16", "fp8-w8a16": "f16.f16", "fp8-w8a8": "e4m3.e4m3"}[
        VARIANTS[variant][0]
    ]
    found = matrix_instructions(code.ptx)
    assert {types for _, types in found} == {operands}
    if config.swap_ab:  # 128 rows of weights on the left: Hopper's warp-group instruction
        assert found == {("wgmma", operands)}
    if code.sass is not None and variant.startswith("fp8-w8a8"):
        assert re.search(r"\bQGMMA\S*\.E4M3\.E4M3", code.sass)
        assert not re.search(r"\bH(?:G)?MMA\b", code.sass)


@pytest.mark.parametrize(("num_stages", "hinted"), [(1, True), (3, False)])
def test_triton_drops_the_policy_of_pipelined_loads(num_stages: int, hinted: bool) -> None:
    """Why weights are not evicted first in the Triton kernels, whose loads are pipelined. Red once Triton keeps the
    mark: then it is to be measured there."""
    from backends.triton_launch import compile_kernel
    from tests.policy_kernel import product_kernel

    config = Config(num_warps=4, num_stages=num_stages)
    code = compile_kernel(product_kernel, ["*fp16", "*fp16", "*fp32"], {"K": 1024, "BLOCK_K": 64}, config)
    assert ("cp.async.cg" in code.ptx) != hinted
    assert ("L2::cache_hint" in code.ptx) == hinted


def splits() -> list[object]:
    """Each reduction in 16 bits and FP8; by default those that differ in what is added, and none of pallas-triton's, as
    XLA takes ten times as long as Triton."""
    variants = ("fp16", "bf16", "fp8-w8a16-channel", "fp8-w8a8-block")
    default = {
        *(("torch-triton", "fp16", reduction) for reduction in REDUCTIONS),
        ("torch-triton", "bf16", "atomic"),
        ("torch-triton", "fp8-w8a16-channel", "two-pass"),
        ("torch-triton", "fp8-w8a8-block", "atomic-fp32"),
    }
    every = [("torch-triton", variant) for variant in variants] + [("pallas-triton", "fp8-w8a8-block")]
    return [
        pytest.param(*pair, reduction, marks=() if (*pair, reduction) in default else pytest.mark.slow)
        for pair in every
        for reduction in REDUCTIONS
    ]


@pytest.mark.parametrize(("backend", "variant", "reduction"), splits())
def test_split_k_compiles(backend: str, variant: str, reduction: str) -> None:
    """As without parts: nothing spills, the same matrix instructions, loads ahead. And the additions are what they
    should be: of the right type, several elements at once, without an order that sums do not need."""
    config, problem = config_of(backend, variant), problem_of(variant)
    order = order_of(backend, variant)
    whole = compiled(backend, problem, order, config)
    code = compiled(backend, problem, order, config.replace(split_k=4, reduction=reduction))
    assert_fits(code, config)
    assert matrix_instructions(code.ptx) == matrix_instructions(whole.ptx)
    assert code.shared_bytes == whole.shared_bytes
    assert code.ptx.count("cp.async.cg") == whole.ptx.count("cp.async.cg") > 0
    element = "f16" if variant == "fp16" else "bf16"
    wanted = {"two-pass": None, "atomic": f"relaxed.add.noftz.v4.{element}", "atomic-fp32": "relaxed.add.v4.f32"}
    found = set(re.findall(r"\b(?:atom|red)\.global\.gpu\.([\w.]+)", code.ptx))
    assert found == {wanted[reduction]} - {None}
    itemsize = 2 if reduction == "atomic" else 4
    assert_wide(code.ptx, problem.n, itemsize)


def multiplications_by(ptx: str, constants: set[int]) -> set[str]:
    """Widths of the integer multiplications by one of these constants: "wide", "lo.s32", "lo.s64", ..."""
    found = re.findall(r"\b(?:mul|mad)\.(wide|lo\.[su]\d+)\S*\s+[^;]*?,\s*(\d+)\s*[,;]", ptx)
    return {width for width, constant in found if int(constant) in constants}


@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        pytest.param(backend, variant, marks=pytest.mark.slow if (backend, variant) in _SPARED else ())
        for backend in ("torch-triton", "jax-triton", "pallas-triton")
        for variant in ("fp16", "fp8-w8a8-channel", "fp8-w8a8-block")
    ],
)
def test_offsets_are_64_bit(backend: str, variant: str) -> None:
    """An expert's weights start at expert * N * K, past 2**31; a slot's row of y at slot * N, too.

    The strides are constants of the compiled code, so the multiplications by them tell. pallas-mosaic has none: it
    hands expert, row and column to the copy engine as three coordinates.
    """
    problem = problem_of(variant)
    assert problem.experts * problem.n * problem.k > 2**31
    assert problem.slots * problem.n > 2**31
    ptx = compiled(backend, problem, order_of(backend, variant), config_of(backend, variant)).ptx
    assert_wide(ptx, problem.n * problem.k, problem.w_itemsize)
    if variant != "fp8-w8a8-channel":  # there, an expert's channel scales start at expert * N as well, which is small
        assert_wide(ptx, problem.n, 2)


def assert_wide(ptx: str, stride: int, itemsize: int) -> None:
    """All multiplications by a stride, in elements or bytes, have a 64-bit result, and there are some."""
    widths = multiplications_by(ptx, {stride, stride * itemsize})
    assert widths, f"no multiplication by {stride}"
    assert widths <= {"wide", "lo.s64", "lo.u64"}, f"by {stride}: {widths}"


def configs_in_use() -> list[object]:
    """backend, variant, tokens. pallas-mosaic's take up to ten seconds: by default without bf16, which differs from
    fp16 in the name of the instruction only, and with block scales at few tokens."""
    return [
        pytest.param(
            backend, variant, tokens, id=f"{backend}-{variant}-{tokens}",
            marks=pytest.mark.slow
            if backend == "pallas-triton"
            or (backend == "pallas-mosaic" and (variant == "bf16" or (variant.endswith("block") and tokens > 8)))
            else (),
        )
        for backend in ("torch-triton", "pallas-mosaic", "pallas-triton")
        for variant in VARIANTS
        for tokens in (8, 512)
    ]  # fmt: skip


@pytest.mark.parametrize(("backend", "variant", "tokens"), configs_in_use())
def test_configs_that_calls_get_do_not_spill(backend: str, variant: str, tokens: int) -> None:
    dtype, layout = VARIANTS[variant]
    problem = models.model("mixtral-8x7b").problem("gate-up", tokens, dtype, scale_layout=layout or "channel")
    config = backends.config_for(problem, backend=backend, gpu="NVIDIA H200")
    assert_fits(compiled(backend, problem, "column", config), config)


@pytest.mark.parametrize("backend", ["torch-triton", "pallas-triton"])
def test_widened_weights_do_not_serialise_the_products(backend: str) -> None:
    """ptxas puts a wait behind each warp-group instruction where it finds no order that is right without (C7514).

    A tall tile's weights go to the instruction from registers, for two sums: as one product a step, XLA's lowering of
    it was such a case, a third slower than Triton's.
    """
    problem = Problem.of("fp8-w8a16", tokens=128, experts=8, n=512, k=4096, top_k=2)
    code = compiled(backend, problem, "column", Config(block_m=80, block_n=64, block_k=128, num_stages=3))
    if code.sass is None:
        pytest.skip("no disassembler")
    products, waits = code.sass.count("HGMMA"), code.sass.count("WARPGROUP.DEPBAR")
    assert products == 24, "64 and 16 rows of 128 values of K, and 64 alone"
    assert 0 < waits < products / 2


@pytest.mark.parametrize(
    ("rows", "channels", "warps", "stages"),
    [(64, 64, 4, 4), (64, 64, 8, 3), (48, 64, 8, 3), (64, 128, 8, 3), (64, 128, 16, 2), (64, 64, 16, 2)],
)
def test_shared_memory_of_two_products_a_step(rows: int, channels: int, warps: int, stages: int) -> None:
    """pallas-triton refuses by this figure what the compiler would find too large."""
    from backends import pallas_triton

    config = Config(block_m=rows, block_n=channels, block_k=128, num_warps=warps, num_stages=stages)
    weights = {"dtype": "fp8-w8a16", "tokens": 128, "experts": 8, "n": 512, "top_k": 2}
    for k in (1024, 1088):  # by pairs, and one by one
        problem = Problem.of(k=k, **weights)
        expected = pallas_triton._shared_bytes(problem, config)
        assert compiled("pallas-triton", problem, "row", config).shared_bytes == expected


@pytest.mark.parametrize("backend", ["torch-triton", "pallas-mosaic"])
def test_the_deepest_pipeline_that_is_accepted_fits(backend: str) -> None:
    """What `unsupported` allows, the compiler must not find too large for a thread block."""
    problem = Problem.of("fp16", tokens=64, experts=8, n=4096, k=4096, top_k=2)
    module = backends.load(backend)
    accepted = [s for s in range(2, 17) if module.unsupported(problem, Config(num_stages=s)) is None]
    assert accepted == list(range(2, max(accepted) + 1))
    assert max(accepted) < 16
    code = compiled(backend, problem, "row", Config(num_stages=max(accepted)))
    assert SHARED_MEMORY - 40_000 < code.shared_bytes <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("variant", "popularity", "tokens"),
    [
        ("fp16", "none", 8),
        ("fp16", "given", 70_000),
        ("fp8-w8a8-channel", "counts", 8),
        ("fp8-w8a8-channel", "given", 8),
        ("fp8-w8a8-channel", "none", 70_000),
    ],
)
def test_preparing_compiles(variant: str, popularity: str, tokens: int) -> None:
    """For DeepSeek-V3's 256 experts: each way to plan, alone and beside the scaling of a row of x that is long."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from backends import triton_launch
    from backends.compiled import compile_ptx

    problem = dataclasses.replace(problem_of(variant), experts=256, tokens=tokens, k=14336)
    kernel = triton_launch.kernel("prepare_kernel")
    constants = triton_launch.prepare_constants(problem, 16, popularity, x_stride=problem.k)
    options = {"num_warps": constants.pop("num_warps")}
    signature = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(constants, "constexpr") | {"slots": "i32"}
    if problem.scales_x:
        signature |= {"x_ptr": "*bf16", "scaled_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    report = compile_ptx(code.asm["ptx"], code.metadata.shared)
    assert report.spills == 0
    assert report.registers * 32 * options["num_warps"] <= REGISTERS
    # One program of few slots compares them in pairs; a program of a bucket counts by additions in shared memory.
    assert bool(re.search(r"\batom\.\S*shared\S*\.add", report.ptx)) == (tokens > 8)


@pytest.mark.parametrize("kernel_name", ["moe_gemm_kernel_zero", "moe_gemm_kernel_reduce"])
def test_small_kernels_compile(kernel_name: str) -> None:
    """The Triton kernels beside a GEMM with a split K."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from backends import triton_launch
    from backends.compiled import compile_ptx

    problem = problem_of("fp8-w8a8-block")
    kernel = triton_launch.kernel(kernel_name)
    if kernel_name == "moe_gemm_kernel_zero":
        constants = triton_launch.zero_constants(problem)
        pointers = {"sums_ptr": "*bf16", "slots": "i32"}
    else:
        constants = triton_launch.reduce_constants(problem, Config(split_k=64))
        pointers = dict.fromkeys(("sums_ptr", "w_scale_ptr", "x_scale_ptr", "topk_weight_ptr"), "*fp32")
        pointers |= {"topk_ids_ptr": "*i32", "y_ptr": "*bf16", "slots": "i32"}
    signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
    assert sorted(signature) == sorted(kernel.arg_names)
    source = ASTSource(fn=kernel, signature={name: signature[name] for name in kernel.arg_names}, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    report = compile_ptx(code.asm["ptx"], code.metadata.shared)
    assert report.spills == 0
    assert report.registers <= 255
    assert_wide(report.ptx, problem.n, 2)  # PARTS * S * N and S * N pass 2**31


def test_matrix_instructions_are_told_apart() -> None:
    """The reading of PTX above, on lines of the kinds that compilers write."""
    ptx = """
    wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2, p, 1, 1;
    { .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%r1}, %rd3, %rd4, p; }
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
    wgmma.wait_group.sync.aligned 0;
    """
    assert matrix_instructions(ptx) == {("wgmma", "e4m3.e4m3"), ("wgmma", "f16.f16"), ("mma", "bf16.bf16")}
    ptx = """
    mul.wide.u32 	%rd99, %r28, 59040000;
    mad.wide.s32 	%rd1, %r18, 8200, %rd28;
    mad.lo.s32 	%r306, %r34, 4100, %r12;
    mul.lo.s64 	%rd3, %rd4, 7;
    """
    assert multiplications_by(ptx, {59040000}) == multiplications_by(ptx, {8200}) == {"wide"}
    assert multiplications_by(ptx, {4100}) == {"lo.s32"}
    assert multiplications_by(ptx, {7}) == {"lo.s64"}


@pytest.mark.parametrize("reduction", ["two-pass", "atomic-fp32"])
def test_split_k_of_one_slot_lowers(reduction: str) -> None:
    """jax-triton makes a constant of an argument that is 1, as the number of slots is here."""
    from backends import jax_triton, xla_compile

    problem = Problem.of("fp16", tokens=1, experts=1, n=1, k=33, top_k=1)
    config = Config(block_m=16, block_n=64, block_k=32, num_stages=2, split_k=4, reduction=reduction)

    def call(*arrays: Any) -> Any:
        return jax_triton.moe_gemm(*arrays, problem=problem, order="row", config=config)

    module = xla_compile.lower(call, xla_compile.argument_types(problem)).compiler_ir()
    kernels = [str(op.attributes["call_target_name"]) for op in xla_compile.custom_calls(module)]
    assert len(kernels) >= 3  # prepare, GEMM, reduction


def test_without_the_plugin_its_compilers_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends import xla_compile

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name.split('.')[0]!r}")

    monkeypatch.setattr(xla_compile.importlib, "import_module", absent)
    with pytest.raises(RuntimeError, match=r"CUDA plugin is not installed; install jax\[cuda13\]"):
        xla_compile.plugin_library()
