"""What the frameworks' transformations make of a call: torch.compile, export, vmap, derivatives, jit, donation.

On the CPU the operator runs through the interpreters and is compiled by Dynamo and AOTAutograd; Inductor's GPU code and
compiled JAX programs need a GPU. `notes/guarantees.md` states what is held here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import backends
from backends import ArgumentError, arrays
from shared.orders import ORDERS
from tests.cases import SMALL
from tests.kinds import K, T, arguments
from tests.test_door import JAX_BACKENDS, on_gpu
from tests.where import HAS_GPU, INTERPRET, NUMERICS

EVERY_BACKEND = pytest.mark.parametrize("backend", backends.BACKENDS)
EVERY_JAX_BACKEND = pytest.mark.parametrize("backend", JAX_BACKENDS)
# JAX's rules are the same for its three backends, and Mosaic's interpreter takes many times as long as the others.
QUICK_JAX_BACKENDS = pytest.mark.parametrize(
    "backend",
    [pytest.param(b, marks=pytest.mark.slow if INTERPRET and b == "pallas-mosaic" else ()) for b in JAX_BACKENDS],
)
HALF, NARROW = ("fp16", None, "channel"), ("fp8", "w8a8", "block")
MODES = pytest.mark.parametrize(("dtype", "mode", "layout"), [HALF, NARROW])


def given(kind: str, dtype: str = "fp16", layout: str = "channel") -> dict[str, Any]:
    return on_gpu(arguments(kind, dtype, layout), kind)


def door(**options: Any) -> Callable[..., Any]:
    return functools.partial(backends.moe_gemm, **{"config": SMALL, "interpret": INTERPRET, **options})


def same(y: Any, expected: Any) -> bool:
    """Equal dtypes, shapes and bytes."""
    y, expected = arrays.to_host(y), arrays.to_host(expected)
    return y.dtype == expected.dtype and y.shape == expected.shape and y.tobytes() == expected.tobytes()


# torch.compile

COMPILERS = ("eager", "aot_eager", "inductor") if HAS_GPU else ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def _dynamo_forgets() -> None:
    torch._dynamo.reset()


@NUMERICS
@pytest.mark.parametrize(
    ("backend", "dtype", "mode", "layout"),
    [
        pytest.param(
            backend, *mode, marks=pytest.mark.slow if INTERPRET and backend == "pallas-mosaic" and mode == HALF else ()
        )
        for backend in backends.BACKENDS
        for mode in (HALF, NARROW)
    ],
)
def test_compiles_without_a_graph_break(backend: str, dtype: str, mode: str | None, layout: str) -> None:
    """fullgraph=True: one graph, with operators before and after ours, equal to the call bit for bit."""
    call = given("torch", dtype, layout)

    call["popularity"] = on_gpu({"": torch.tensor([3, 0, 7, 1], dtype=torch.int32)}, "torch")[""]

    def layer(**call: Any) -> Any:
        return door(mode=mode, backend=backend, order="popular")(**dict(call, x=call["x"] * 2)) + 1

    expected = layer(**call)
    for compiler in COMPILERS if backend == "torch-triton" else COMPILERS[-1:]:
        assert same(torch.compile(layer, fullgraph=True, backend=compiler)(**call), expected), compiler


def test_the_operator_has_the_whole_config() -> None:
    """Numbers, flags and names of a Config go through the operator's schema and come out the same."""
    from backends import torch_op

    config = backends.Config(
        block_m=32, block_n=64, block_k=256, num_warps=8, num_stages=5, group_m=3, swap_ab=False, split_k=4,
        reduction="atomic", ping_pong=True,
    )  # fmt: skip
    assert all(
        getattr(config, field.name) != getattr(backends.Config(), field.name) for field in dataclasses.fields(config)
    )
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "unrecorded", lambda *given, **keywords: seen.append(keywords) or given[0].new_empty(0))
        for asked in (config, None):
            torch_op.call([*arguments("torch").values(), None], asked, **OPTIONS)
    assert [keywords.pop("config") for keywords in seen] == [config, None]
    assert seen == [OPTIONS, OPTIONS]


@pytest.mark.gpu
def test_compiles_into_cuda_graphs() -> None:
    """mode="reduce-overhead": PyTorch captures our launches itself, and replays them with other routings."""
    call = given("torch")

    def layer(x: Any, ids: Any) -> Any:
        return door(config=SMALL)(x * 2, call["w"], ids) + 1

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for shift in range(6):  # the first calls warm up and capture
        x, ids = call["x"] + shift, call["topk_ids"].roll(shift, 0)
        torch.compiler.cudagraph_mark_step_begin()
        assert same(compiled(x, ids), layer(x, ids))


@NUMERICS
def test_one_compilation_serves_every_number_of_tokens() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = given("torch")
    compiled = torch.compile(door(), fullgraph=True, backend=counter)
    for tokens in (5, 2, 16, 7):
        x = torch.randn(tokens, K, device=call["x"].device).half()
        ids = torch.arange(tokens * 2, device=x.device, dtype=torch.int32).reshape(tokens, 2) % 5 - 1
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(ids, 0)
        assert same(compiled(x, call["w"], ids), door()(x, call["w"], ids))
    assert counter.frame_count == 1


@NUMERICS
def test_a_compiled_call_follows_its_options() -> None:
    """Another order or config compiles again, as the operator has them as text; none is kept from an earlier call."""
    seen = []
    call = given("torch")
    module = backends.load("torch-triton")
    original = module.moe_gemm

    def spy(*native: Any, **options: Any) -> Any:
        seen.append((options["order"], options["config"]))
        return original(*native, **options)

    asked = [(order, SMALL.replace(block_m=16 << i, swap_ab=i != 1)) for i, order in enumerate(ORDERS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moe_gemm", spy)
        patch.setattr(backends, "_repeats", {})  # a call from before would not come by the spy again

        @functools.partial(torch.compile, fullgraph=True, backend="eager")
        def compiled(order: str, config: Any) -> Any:
            return door(order=order, config=config)(**call)

        for order, config in asked:
            compiled(order, config)
        compiled("row", None)
    problem_config = seen.pop()[1]
    assert seen == asked
    assert isinstance(problem_config, backends.Config)


def operator_arguments(call: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """As the door hands them to the operator."""
    from backends import torch_op

    caught: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_op, "operator", lambda *given: caught.append(given))
        names = ("x", "w", "topk_ids", "w_scale", "topk_weight", "popularity")
        torch_op.call([call.get(name) for name in names], SMALL, **options)
    return caught[0]


OPTIONS = {"mode": None, "order": "row", "backend": "torch-triton", "interpret": INTERPRET, "validate": False}


@NUMERICS
@MODES
def test_operator_passes_opcheck(dtype: str, mode: str | None, layout: str) -> None:
    """PyTorch's own checks: schema, autograd registration, the shape rule, and AOTAutograd with dynamic shapes."""
    from backends import torch_op

    call = operator_arguments(given("torch", dtype, layout), **dict(OPTIONS, mode=mode))
    checks = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    if dtype == "fp8":
        checks -= {"test_schema"}  # it copies tensors by multiplying, which PyTorch does not do in FP8
    result = torch.library.opcheck(torch_op.operator, call, test_utils=tuple(checks))
    assert result == dict.fromkeys(checks, "SUCCESS")


def test_opcheck_would_notice_a_wrong_shape_rule() -> None:
    """The check above can fail: the same operator with N and K exchanged in its shape rule."""

    @torch.library.custom_op("moe_tile_order_tests::wrong", mutates_args=(), schema="(Tensor x, Tensor w) -> Tensor")
    def wrong(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0], w.shape[1])

    wrong.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[2]))
    with pytest.raises(Exception, match=r"(?i)shape|size|mismatch"):
        torch.library.opcheck(wrong, (torch.ones(2, 3), torch.ones(4, 5, 3)))


@NUMERICS
@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_round_trip(strict: bool, tmp_path: Any) -> None:
    """torch.export for any number of tokens, saved, loaded, run: one operator in the graph, equal results."""

    class Layer(torch.nn.Module):
        def __init__(self, w: torch.Tensor) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(w, requires_grad=False)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return door()(x, self.w, ids)

    call = given("torch")
    layer = Layer(call["w"])
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    shapes = {"x": {0: tokens}, "ids": {0: tokens}}
    program = torch.export.export(layer, (call["x"], call["topk_ids"]), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2")
    assert [str(node.target) for node in loaded.graph.nodes if node.op == "call_function"] == [
        "moe_tile_order.moe_gemm.default"
    ]
    x, ids = call["x"].repeat(3, 1), call["topk_ids"].repeat(3, 1)
    assert same(loaded.module()(x, ids), layer(x, ids))


@NUMERICS
def test_tracers_of_torch_record_the_call() -> None:
    """make_fx and torch.jit.trace: without the operator they would record the buffers and not the launch."""
    from torch.fx.experimental.proxy_tensor import make_fx

    call = given("torch")
    x, ids = call["x"], call["topk_ids"]

    def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return door()(x, call["w"], ids)

    expected = layer(x * 2, ids.flip(0))
    assert same(make_fx(layer)(x, ids)(x * 2, ids.flip(0)), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit's deprecation
        traced = torch.jit.trace(layer, (x, ids), check_trace=False)
    assert same(traced(x * 2, ids.flip(0)), expected)


def test_fake_and_meta_tensors_give_shapes() -> None:
    """No data, no launch: shape, dtype and device of y, on a machine without a GPU too."""
    from torch._subclasses import FakeTensorMode

    call = arguments("torch", "bf16")
    meta = {name: value if value is None else value.to("meta") for name, value in call.items()}
    y = backends.moe_gemm(**meta)
    assert (y.shape, y.dtype, y.device.type) == ((T, 2, 64), torch.bfloat16, "meta")
    with pytest.raises(ArgumentError, match=r"^x: got K|^w: got K"):
        backends.moe_gemm(**dict(meta, x=meta["x"][:, :-1]))

    mode = FakeTensorMode()
    fake = {name: value if value is None else mode.from_tensor(value) for name, value in call.items()}
    for inside in (False, True):
        with mode if inside else torch.no_grad():
            y = backends.moe_gemm(**fake)
        assert type(y).__name__ == "FakeTensor"
        assert (y.shape, y.dtype, y.device.type) == ((T, 2, 64), torch.bfloat16, "cpu")


@NUMERICS
def test_errors_inside_torch_compile_name_the_argument() -> None:
    """What the shape rule sees fails while compiling, with our text in Dynamo's error; the rest fails when run."""
    call = given("torch")
    compiled = torch.compile(door(), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"topk_ids: got rank 1; allowed: rank 2"):
        compiled(call["x"], call["w"], call["topk_ids"][0])
    with pytest.raises(ArgumentError, match=r"^w: got K = 32 .*allowed: K = 31"):
        compiled(call["x"][:, :-1].contiguous(), call["w"], call["topk_ids"])
    with pytest.raises(ArgumentError, match=r"^order: got 'rows'"):
        torch.compile(door(order="rows"), fullgraph=True, backend="aot_eager")(call["x"], call["w"], call["topk_ids"])
    with pytest.raises(Exception, match=r"x: got .* under torch.compile; allowed there: torch.Tensor"):
        compiled(arguments("numpy")["x"], call["w"], call["topk_ids"])


@NUMERICS
def test_options_of_other_types_under_transformations() -> None:
    """What a plain call takes as an option, a recorded one takes; what it refuses, that refuses with the same error."""
    call = given("torch")
    x, w, ids = call["x"], call["w"], call["topk_ids"]

    def recorded(**options: Any) -> torch.Tensor:
        return torch.vmap(lambda ids: door(**options)(x, w, ids))(ids[None])[0]

    same_options = {"order": np.str_("row"), "config": SMALL.replace(reduction=np.str_("atomic"))}
    assert same(recorded(**same_options), door(order="row", config=SMALL.replace(reduction="atomic"))(x, w, ids))
    for wrong in (object(), float("nan"), ["row"], 5, b"row"):
        with pytest.raises(ArgumentError, match=r"^order: got "):
            recorded(order=wrong)
        with pytest.raises(ArgumentError, match=r"^order: got "):
            door(order=wrong)(x, w, ids)


@NUMERICS
@EVERY_BACKEND
def test_parameters_are_taken_under_no_grad(backend: str) -> None:
    """Weights of a module require a gradient until told otherwise; DLPack refuses them even under torch.no_grad()."""
    call = given("torch")
    with torch.no_grad():
        y = door(backend=backend)(call["x"], torch.nn.Parameter(call["w"]), call["topk_ids"])
    assert same(y, door(backend=backend)(call["x"], call["w"], call["topk_ids"]))


# Derivatives


def derivatives_of_torch() -> dict[str, Callable[[Callable[[Any], Any], Any], Any]]:
    def dual(f: Callable[[Any], Any], x: Any) -> Any:
        from torch.autograd import forward_ad

        with forward_ad.dual_level():
            return f(forward_ad.make_dual(x, x))

    return {
        "requires_grad": lambda f, x: f(x.clone().requires_grad_()),
        "func.grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        "func.vjp": lambda f, x: torch.func.vjp(f, x),
        "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
        "func.jacrev": lambda f, x: torch.func.jacrev(f)(x),
        "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
        "dual numbers": dual,
        "checkpoint": lambda f, x: torch.utils.checkpoint.checkpoint(
            f, x.clone().requires_grad_(), use_reentrant=False
        ),
    }


@NUMERICS
@pytest.mark.parametrize("name", derivatives_of_torch())
def test_torch_derivatives_are_refused(name: str) -> None:
    call = given("torch")

    def layer(x: Any) -> Any:
        return door()(x, call["w"], call["topk_ids"])

    with pytest.raises(ArgumentError, match=r"^x: got a tensor (that|with).*moe_gemm has no derivative"):
        derivatives_of_torch()[name](layer, call["x"])


@NUMERICS
@pytest.mark.parametrize("name", ["requires_grad", pytest.param("func.grad", marks=pytest.mark.slow), "func.jvp"])
def test_torch_derivatives_are_refused_inside_compile(name: str) -> None:
    """fullgraph=True: Dynamo's error carries our text. Without it the call runs uncompiled and raises ours."""
    call = given("torch")
    derive = derivatives_of_torch()[name]

    def layer(x: Any) -> Any:
        return door()(x, call["w"], call["topk_ids"])

    x = call["x"].clone().requires_grad_(name == "requires_grad")
    asked = layer if name == "requires_grad" else (lambda x: derive(layer, x))
    with pytest.raises(Exception, match=r"x: got a tensor (that|with).*moe_gemm has no derivative"):
        torch.compile(asked, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match=r"^x: got a tensor (that|with).*moe_gemm has no derivative"):
        torch.compile(asked, backend="eager")(x)


@NUMERICS
def test_the_operator_refuses_autograd_at_the_call() -> None:
    """Called as torch.ops.moe_tile_order.moe_gemm, past the door: not a result whose backward() fails later."""
    from backends import torch_op

    x, *others = operator_arguments(given("torch"), **OPTIONS)
    with pytest.raises(ArgumentError, match=r"^x: got a tensor that requires a gradient"):
        torch_op.operator(x.clone().requires_grad_(), *others)


@NUMERICS
@EVERY_JAX_BACKEND
def test_jax_derivatives_are_refused(backend: str) -> None:
    import jax
    import jax.numpy as jnp

    call = given("jax")

    def layer(x: Any, topk_weight: Any) -> Any:
        y = door(backend=backend)(x, call["w"], call["topk_ids"], topk_weight=topk_weight)
        return y.astype(jnp.float32).sum()

    x, weight = call["x"], call["topk_weight"]
    refused = {
        "grad": lambda: jax.grad(layer)(x, weight),
        "grad of jit": lambda: jax.grad(jax.jit(layer))(x, weight),
        "jit of grad": lambda: jax.jit(jax.grad(layer))(x, weight),
        "vjp": lambda: jax.vjp(layer, x, weight),
        "jvp": lambda: jax.jvp(layer, (x, weight), (x, weight)),
        "linearize": lambda: jax.linearize(layer, x, weight),
        "checkpoint": lambda: jax.grad(jax.checkpoint(layer))(x, weight),
        "vmap of grad": lambda: jax.vmap(jax.grad(layer))(x[None], weight[None]),
        "grad of vmap": lambda: jax.grad(lambda x: jax.vmap(layer)(x[None], weight[None]).sum())(x),
    }
    for name, derive in refused.items():
        with pytest.raises(ArgumentError, match=r"^x: got an array under jax.grad.*moe_gemm has no derivative"):
            pytest.fail(f"{name} gave {derive()}")
    with pytest.raises(ArgumentError, match=r"^topk_weight: got an array under jax.grad"):
        jax.grad(layer, argnums=1)(x, weight)


@NUMERICS
@QUICK_JAX_BACKENDS
def test_a_call_without_tangents_may_stand_in_a_differentiated_function(backend: str) -> None:
    import jax
    import jax.numpy as jnp

    call = given("jax")

    def loss(scale: Any) -> Any:
        y = door(backend=backend)(
            jax.lax.stop_gradient(call["x"] * scale.astype(jnp.float16)), call["w"], call["topk_ids"]
        )
        return (y.astype(jnp.float32) * scale).sum()

    one = jnp.float32(1)
    total = door(backend=backend)(call["x"], call["w"], call["topk_ids"]).astype(jnp.float32).sum()
    assert np.allclose(jax.jit(jax.grad(loss))(one), total, rtol=1e-4)


# vmap

BATCH = 3


def a_batch(kind: str, dtype: str, layout: str, names: tuple[str, ...]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(arguments of which `names` have a batch axis in front, the arguments of each call alone)."""
    call = arguments("numpy", dtype, layout)
    if "popularity" in names:
        call["popularity"] = np.array([3, 0, 7, 1], np.int32)
    calls = []
    for b in range(BATCH):
        own = dict(call)
        for name in names:
            value = call[name]
            own[name] = np.roll(value, b, axis=0) if name != "w" else np.roll(value, b, axis=1).copy()
        calls.append(own)

    def convert(value: Any) -> Any:
        return value if value is None else on_gpu({"": arrays.to_framework(value, kind, on_gpu=False)}, kind)[""]

    stacked = {name: np.stack([c[name] for c in calls]) if name in names else value for name, value in call.items()}
    return (
        {name: convert(value) for name, value in stacked.items()},
        [{name: convert(value) for name, value in c.items()} for c in calls],
    )


BATCHED = [
    ("topk_ids",),
    ("x", "topk_ids", "topk_weight"),
    ("w", "w_scale"),
    ("x", "w", "w_scale", "topk_ids", "popularity"),
    ("x", "popularity"),
]


def vmapped(kind: str, f: Callable[..., Any], call: dict[str, Any], names: tuple[str, ...]) -> Any:
    """f over a batch axis of `names`; the other arguments are the same in every call."""
    if kind == "torch":
        return torch.vmap(lambda *own: f(**dict(call, **dict(zip(names, own, strict=True)))))(*(call[n] for n in names))
    import jax

    return jax.vmap(lambda *own: f(**dict(call, **dict(zip(names, own, strict=True)))))(*(call[n] for n in names))


def vmapped_calls() -> list[Any]:
    """Every batch in torch and in one backend of JAX; the others, in an interpreter, by default with one."""
    return [
        pytest.param(
            names, backend, id=f"{'-'.join(names)}-{backend}",
            marks=() if HAS_GPU or backend in ("torch-triton", "pallas-triton") or len(names) > 3 else pytest.mark.slow,
        )
        for names in BATCHED
        for backend in backends.BACKENDS
    ]  # fmt: skip


@NUMERICS
@pytest.mark.parametrize(("names", "backend"), vmapped_calls())
def test_vmap_is_the_calls_one_by_one(names: tuple[str, ...], backend: str) -> None:
    dtype, layout = ("fp8", "block") if "w" in names else ("fp16", "channel")
    kind = backends.load(backend).FRAMEWORK
    batched, calls = a_batch(kind, dtype, layout, names)
    f = door(backend=backend, order="popular" if "popularity" in names else "row")
    y = arrays.to_host(vmapped(kind, f, batched, names))
    assert y.shape == (BATCH, T, 2, 64)
    for b, call in enumerate(calls):
        expected = arrays.to_host(f(**call)).astype(np.float64)
        # To the last bit of y: an interpreter's dot may round otherwise where a row has another place in its tile.
        ulp = 2.0 ** -(10 if dtype == "fp16" else 7)
        np.testing.assert_allclose(y[b].astype(np.float64), expected, rtol=ulp, atol=ulp)


@NUMERICS
@QUICK_JAX_BACKENDS
def test_vmap_nests_and_meets_jit(backend: str) -> None:
    import jax
    import jax.numpy as jnp

    call = given("jax")
    f = door(backend=backend)
    x = jnp.stack([call["x"] * i for i in range(1, 5)]).reshape(2, 2, *call["x"].shape)
    inner = jax.vmap(lambda x: f(x, call["w"], call["topk_ids"]))
    y = jax.jit(jax.vmap(inner, in_axes=2, out_axes=1))(jnp.moveaxis(x, 0, 2))
    for i in range(2):
        for j in range(2):
            expected = f(x[i, j], call["w"], call["topk_ids"]).astype(jnp.float32)
            np.testing.assert_allclose(y[j, i].astype(jnp.float32), expected, rtol=2**-10, atol=2**-10)


@NUMERICS
def test_a_wrong_expert_does_not_become_another_calls_expert() -> None:
    """Expert E of call 0 would be expert 0 of call 1 if numbers were only shifted."""
    import jax

    batched, _ = a_batch("jax", "fp16", "channel", ("w",))
    ids = batched["topk_ids"].at[0, 0].set(batched["w"].shape[1])
    y = jax.jit(jax.vmap(lambda w: door(backend="pallas-triton")(batched["x"], w, ids)))(batched["w"])
    assert not np.asarray(y[:, 0, 0]).any()
    assert np.asarray(y[:, 0, 1]).any()
    torch_batched, _ = a_batch("torch", "fp16", "channel", ("w",))
    ids = torch_batched["topk_ids"].clone()
    ids[0, 0] = 4
    with pytest.raises(ArgumentError, match=r"^topk_ids: got 12 at"):
        torch.vmap(lambda w: door(validate=True)(torch_batched["x"], w, ids))(torch_batched["w"])


@NUMERICS
def test_vmap_over_scales_alone_is_refused() -> None:
    import jax

    for kind, vmap, backend in (("torch", torch.vmap, "torch-triton"), ("jax", jax.vmap, "jax-triton")):
        batched, _ = a_batch(kind, "fp8", "channel", ("w_scale",))
        with pytest.raises(ArgumentError, match=r"^w_scale: got a batch axis under vmap, but w has none"):
            vmap(lambda s, b=batched, e=backend: door(backend=e)(b["x"], b["w"], b["topk_ids"], w_scale=s))(
                batched["w_scale"]
            )


# JAX programs


@NUMERICS
@QUICK_JAX_BACKENDS
def test_donated_buffers(backend: str) -> None:
    """x given away to a function whose result has its shape and dtype: the result is right, and x is gone."""
    import jax
    import jax.numpy as jnp

    call = given("jax")

    def block(x: Any, w: Any, ids: Any) -> Any:
        y = door(backend=backend)(x, w, ids)
        return x + y.sum(axis=1)[:, : x.shape[1]]

    expected = jax.jit(block)(call["x"], call["w"], call["topk_ids"])
    x = jnp.array(call["x"], copy=True)
    assert same(jax.jit(block, donate_argnums=0)(x, call["w"], call["topk_ids"]), expected)
    assert x.is_deleted()
    with pytest.raises(RuntimeError, match=r"deleted"):
        door(backend=backend)(x, call["w"], call["topk_ids"])


@NUMERICS
@QUICK_JAX_BACKENDS
def test_other_transformations_need_nothing(backend: str) -> None:
    """scan, map, checkpoint without a derivative, shard_map over one device: as the call itself."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    call = given("jax")

    def f(x: Any) -> Any:
        return door(backend=backend)(x, call["w"], call["topk_ids"])

    expected = f(call["x"])
    assert same(jax.checkpoint(f)(call["x"]), expected)
    assert same(jax.lax.map(f, call["x"][None])[0], expected)
    assert same(jax.lax.scan(lambda carry, x: (carry, f(x)), 0, jnp.stack([call["x"]] * 2))[1][1], expected)
    mesh = jax.sharding.Mesh(np.array(list(call["x"].devices())), ("d",))
    sharded = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    assert same(jax.jit(sharded)(call["x"]), expected)


# Which of a backend's custom calls JAX has to be told to export: it promises compatibility for Mosaic's alone.
UNCHECKED = {
    "jax-triton": ["triton_kernel_call_ffi"],
    "pallas-triton": ["__gpu$xla.gpu.triton"],
    "pallas-mosaic": ["__gpu$xla.gpu.triton"],  # what comes before its GEMM
}


def exported(backend: str, unchecked: list[str]) -> Any:
    """A call exported for platform cuda, for a described H100, with no device."""
    import jax
    from jax import export

    from backends import xla_compile
    from shared.problem import Problem

    problem = Problem.of("fp8-w8a8", tokens=4, experts=4, n=256, k=128, top_k=2)
    types = [t for t in xla_compile.argument_types(problem) if t is not None]
    device = jax.sharding.AbstractDevice(device_kind=xla_compile.DEVICE_KIND, num_cores=132, platform="gpu")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in unchecked]

    def call(x: Any, w: Any, ids: Any, w_scale: Any) -> Any:
        return backends.moe_gemm(x, w, ids, w_scale=w_scale, mode="w8a8", backend=backend, config=backends.Config())

    with (
        warnings.catch_warnings(),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("d",), abstract_device=device)),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(*types)


@pytest.mark.compile_only
@EVERY_JAX_BACKEND
def test_jax_export_for_cuda_without_a_device(backend: str) -> None:
    """Exported here, run elsewhere. Custom calls of Triton have to be named in disabled_checks."""
    program = exported(backend, UNCHECKED[backend])
    assert program.platforms == ("cuda",)
    assert [(aval.shape, aval.dtype.name) for aval in program.out_avals] == [((4, 2, 256), "bfloat16")]
    with pytest.raises(ValueError, match=r"no compatibility guarantees"):
        exported(backend, [])


@pytest.mark.compile_only
@EVERY_JAX_BACKEND
@pytest.mark.skipif(importlib.util.find_spec("flatbuffers") is None, reason="jax.export serialises with flatbuffers")
def test_jax_export_round_trip(backend: str) -> None:
    from jax import export

    program = exported(backend, UNCHECKED[backend])
    again = export.deserialize(program.serialize())
    assert again.mlir_module_serialized == program.mlir_module_serialized
    assert (again.platforms, str(again.out_avals)) == (program.platforms, str(program.out_avals))


@pytest.mark.gpu
@EVERY_JAX_BACKEND
def test_an_exported_call_runs(backend: str) -> None:
    """What was exported without a device, called on this one: equal to the call itself."""
    import jax
    import jax.numpy as jnp

    program = exported(backend, UNCHECKED[backend])
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, 128), jnp.bfloat16)
    w = jax.random.normal(keys[1], (4, 256, 128)).astype(jnp.float8_e4m3fn)
    ids = jax.random.randint(keys[2], (4, 2), -1, 4)
    scale = jnp.full((4, 256), 0.5, jnp.float32)
    expected = backends.moe_gemm(x, w, ids, w_scale=scale, mode="w8a8", backend=backend, config=backends.Config())
    assert same(jax.jit(program.call)(x, w, ids, scale), expected)


@EVERY_JAX_BACKEND
def test_symbolic_shapes_are_refused(backend: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax import export

    (tokens,) = export.symbolic_shape("tokens")
    x = jax.ShapeDtypeStruct((tokens, K), jnp.float16)
    w, ids = jax.ShapeDtypeStruct((4, 64, K), jnp.float16), jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    with pytest.raises(ArgumentError, match=r"^x: got the symbolic shape \(tokens, 32\); allowed: numbers"):
        export.export(jax.jit(door(backend=backend, interpret=True)), platforms=["cpu"])(x, w, ids)
