"""Bad input: a clear error before anything is launched; and what is no error."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import backends
from backends import ArgumentError, BackendUnavailable, Config, DtypeError
from shared import gpus, models, routing
from shared.checks import ArraySpec, check_arguments
from shared.problem import Problem
from tests.kinds import KINDS, E, K, N, T, arguments, convert, numpy_arguments
from tests.where import HAS_GPU, NUMERICS

Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Bad:
    """change: of the valid arguments; says: what the message must hold, argument, given and allowed."""

    name: str
    change: Change
    says: tuple[str, ...]
    error: type[Exception] = ArgumentError
    dtype: str = "fp16"
    kinds: tuple[str, ...] = KINDS


def change(**new: Any) -> Change:
    """Replace arguments; a function is applied to the old value."""
    return lambda given: {name: value(given[name]) if callable(value) else value for name, value in new.items()}


def cast(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(dtype)


def entry(index: tuple[int, ...], value: float) -> Callable[[np.ndarray], np.ndarray]:
    def put(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return put


STRIDED = ("torch", "numpy")  # JAX arrays have no strides
WITH_INT64 = ("torch", "numpy")  # JAX makes int32 of int64

HEAT = np.arange(E, dtype=np.int32)

BAD = [
    Bad("x-rank-1", change(x=lambda x: x[0]), ("x: got rank 1", "allowed: rank 2, (T, K)")),
    Bad("x-rank-3", change(x=lambda x: x[None]), ("x: got rank 3", "rank 2")),
    Bad("w-rank-2", change(w=lambda w: w[0]), ("w: got rank 2", "rank 3, (E, N, K)")),
    Bad("ids-rank-1", change(topk_ids=lambda i: i[:, 0]), ("topk_ids: got rank 1", "(T, top_k)")),
    Bad("k-disagrees", change(x=lambda x: x[:, :16]), ("w: got K = 32", "K = 16")),
    Bad("t-disagrees", change(topk_ids=lambda i: i[:2]), ("topk_ids: got T = 2", "T = 3")),
    Bad("no-experts", change(w=lambda w: w[:0]), ("w: got E = 0", "1 or more")),
    Bad("no-channels", change(w=lambda w: w[:, :0]), ("w: got N = 0", "1 or more")),
    Bad("no-depth", change(x=lambda x: x[:, :0], w=lambda w: w[:, :, :0]), ("w: got K = 0", "1 or more")),
    Bad("top-k-0", change(topk_ids=lambda i: i[:, :0]), ("topk_ids: got top_k = 0", "1 or more")),
    Bad("x-float32", change(x=cast(np.float32)), ("x: got dtype float32", "float16, bfloat16"), DtypeError),
    Bad(
        "w-float32",
        change(w=cast(np.float32)),
        ("w: got dtype float32", "float16, bfloat16, float8_e4m3fn"),
        DtypeError,
    ),
    Bad(
        "w-e5m2",
        change(w=cast(ml_dtypes.float8_e5m2)),
        ("w: got dtype float8_e5m2",),
        DtypeError,
        kinds=("jax", "numpy"),
    ),
    Bad(
        "x-bf16-w-fp16",
        change(x=cast(ml_dtypes.bfloat16)),
        ("x: got dtype bfloat16 in mode fp16", "float16"),
        DtypeError,
    ),
    Bad("x-fp8", change(x=cast(ml_dtypes.float8_e4m3fn)), ("x: got dtype float8_e4m3fn",), DtypeError, dtype="fp8"),
    Bad(
        "ids-int64",
        change(topk_ids=cast(np.int64)),
        ("topk_ids: got dtype int64", "int32"),
        DtypeError,
        kinds=WITH_INT64,
    ),
    Bad("ids-int16", change(topk_ids=cast(np.int16)), ("topk_ids: got dtype int16", "int32"), DtypeError),
    Bad("ids-float32", change(topk_ids=cast(np.float32)), ("topk_ids: got dtype float32", "int32"), DtypeError),
    Bad("ids-bool", change(topk_ids=cast(bool)), ("topk_ids: got dtype bool", "int32"), DtypeError),
    Bad(
        "mode-fp16-w-fp8",
        change(mode="fp16"),
        ("w: got dtype float8_e4m3fn in mode fp16", "float16"),
        DtypeError,
        dtype="fp8",
    ),
    Bad("mode-bf16-w-fp16", change(mode="bf16"), ("w: got dtype float16 in mode bf16", "bfloat16"), DtypeError),
    Bad(
        "mode-w8a8-w-fp16", change(mode="w8a8"), ("w: got dtype float16 in mode fp8-w8a8", "float8_e4m3fn"), DtypeError
    ),
    Bad("mode-unknown", change(mode="int4"), ("mode: got 'int4'", "known: fp16, bf16, fp8-w8a16, fp8-w8a8")),
    Bad("mode-near", change(mode="fp8-w8a61"), ("mode: got 'fp8-w8a61'", "did you mean 'fp8-w8a16'?")),
    Bad("scale-missing", change(w_scale=None), ("w_scale: got None", f"(E, N) = ({E}, {N})"), dtype="fp8"),
    Bad("scale-superfluous", change(w_scale=np.ones((E, N), np.float32)), ("w_scale: got shape (4, 64)", "None")),
    Bad("scale-e-disagrees", change(w_scale=lambda s: s[:3]), ("w_scale: got shape (3, 64)", "(4, 64)"), dtype="fp8"),
    Bad(
        "scale-n-disagrees", change(w_scale=lambda s: s[:, :63]), ("w_scale: got shape (4, 63)", "(4, 64)"), dtype="fp8"
    ),
    Bad(
        "scale-per-tensor", change(w_scale=lambda s: s[:, :1]), ("w_scale: got shape (4, 1)", "(4, 1, 1)"), dtype="fp8"
    ),
    Bad(
        "scale-float16",
        change(w_scale=cast(np.float16)),
        ("w_scale: got dtype float16", "float32"),
        DtypeError,
        dtype="fp8",
    ),
    Bad("weight-misshapen", change(topk_weight=lambda r: r[:, :1]), ("topk_weight: got shape (3, 1)", "(3, 2)")),
    Bad(
        "weight-float16",
        change(topk_weight=cast(np.float16)),
        ("topk_weight: got dtype float16", "float32"),
        DtypeError,
    ),
    Bad(
        "w-k-not-contiguous",
        change(w=lambda w: np.ascontiguousarray(w.transpose(0, 2, 1)).transpose(0, 2, 1)),
        ("w: got strides", "last dimension (K) contiguous"),
        kinds=STRIDED,
    ),
    Bad(
        "x-k-not-contiguous",
        change(x=lambda x: np.ascontiguousarray(x.T).T),
        ("x: got strides", "last dimension (K) contiguous"),
        kinds=STRIDED,
    ),
    Bad("id-e", change(topk_ids=entry((1, 1), E)), ("topk_ids: got 4 at [1, 1]", "-1 to 3")),
    Bad("id-minus-2", change(topk_ids=entry((2, 0), -2)), ("topk_ids: got -2 at [2, 0]", "-1 to 3")),
    Bad(
        "scale-nan",
        change(w_scale=entry((1, 5), np.nan)),
        ("w_scale: got nan at [1, 5]", "finite and above 0"),
        dtype="fp8",
    ),
    Bad("scale-inf", change(w_scale=entry((1, 5), np.inf)), ("w_scale: got inf at [1, 5]", "finite"), dtype="fp8"),
    Bad("scale-0", change(w_scale=entry((0, 0), 0.0)), ("w_scale: got 0.0 at [0, 0]", "above 0"), dtype="fp8"),
    Bad(
        "scale-negative", change(w_scale=entry((3, 63), -1.0)), ("w_scale: got -1.0 at [3, 63]", "above 0"), dtype="fp8"
    ),
    Bad("x-none", change(x=None), ("x: got None", "torch.Tensor"), DtypeError),
    Bad(
        "ids-list",
        change(topk_ids=lambda i: i.tolist()),
        ("topk_ids: got list", "torch.Tensor, a jax.Array"),
        DtypeError,
    ),
    Bad(
        "order-unknown",
        change(order="columns"),
        ("order: got 'columns'", "row, column, grouped", "did you mean 'column'?"),
    ),
    Bad("order-published", change(order="published-2024"), ("order: got 'published-2024'", "row, column, grouped")),
    Bad(
        "popularity-other-order",
        change(popularity=HEAT, order="grouped"),
        ("popularity: got an array with order 'grouped'", 'None, or order "popular"'),
    ),
    Bad(
        "popularity-shape",
        change(popularity=HEAT[:3], order="popular"),
        ("popularity: got shape (3,)", "(E,) = (4,)"),
    ),
    Bad(
        "popularity-float",
        change(popularity=HEAT.astype(np.float32), order="popular"),
        ("popularity: got dtype float32", "int32"),
        DtypeError,
    ),
    Bad(
        "popularity-list",
        change(popularity=[1, 2, 3, 4], order="popular"),
        ("popularity: got list", "torch.Tensor, a jax.Array"),
        DtypeError,
    ),
    Bad("config-dict", change(config={"block_m": 16}), ("config: got dict", "backends.Config")),
    Bad(
        "config-shared-memory",
        change(config=Config(block_m=64, block_n=256, block_k=256, num_stages=8)),
        ("shared memory", "232448"),
    ),
]


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any backend that is called fails the test."""
    for name in backends.BACKENDS:
        module = backends.load(name)
        monkeypatch.setattr(module, "moe_gemm", lambda *a, name=name, **k: pytest.fail(f"{name} was launched"))


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize(
    ("bad", "kind"), [pytest.param(bad, kind, id=f"{bad.name}-{kind}") for bad in BAD for kind in bad.kinds]
)
def test_refused_before_launch(bad: Bad, backend: str, kind: str) -> None:
    given = numpy_arguments(bad.dtype)
    call = {name: keep_strides(value, kind) for name, value in (given | bad.change(given)).items()}
    with pytest.raises(bad.error) as caught:
        backends.moe_gemm(**call, backend=backend, interpret=True)
    for part in bad.says:
        assert part in str(caught.value)


def keep_strides(value: Any, kind: str) -> Any:
    """As `convert`; a transposed NumPy array becomes a transposed tensor."""
    if isinstance(value, np.ndarray) and kind == "torch" and value.ndim > 1 and not value.flags.c_contiguous:
        axes = (0, 2, 1) if value.ndim == 3 else (1, 0)
        transposed = value.transpose(axes)
        if transposed.flags.c_contiguous:
            return convert(transposed, "torch").permute(axes)
        return convert(np.ascontiguousarray(value), "torch")
    return convert(value, kind)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("kind", KINDS)
def test_unknown_backend_lists_the_known(kind: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        backends.moe_gemm(**arguments(kind), backend="triton", interpret=True)
    assert "backend: got 'triton'" in str(caught.value)
    for name in backends.BACKENDS:
        assert name in str(caught.value)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("odd", ["w", "topk_ids", "topk_weight"])
def test_mixed_kinds(backend: str, odd: str) -> None:
    call = arguments("torch") | {odd: numpy_arguments()[odd]}
    with pytest.raises(DtypeError, match=f"^{odd}: got a numpy array; allowed: torch, the kind of x"):
        backends.moe_gemm(**call, backend=backend, interpret=True)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("odd", ["w", "topk_ids", "topk_weight"])
def test_different_devices(backend: str, odd: str) -> None:
    call = arguments("torch")
    call[odd] = call[odd].to("cuda" if HAS_GPU else "meta")
    with pytest.raises(ArgumentError, match="different devices") as caught:
        backends.moe_gemm(**call, backend=backend, interpret=True)
    assert f"{odd} on {'cuda' if HAS_GPU else 'meta'}" in str(caught.value)
    assert "x on cpu" in str(caught.value)


def test_different_devices_of_jax() -> None:
    """JAX on the CPU has one device; its arrays meet the same check through their description."""
    x, w, ids = (
        ArraySpec(shape=shape, dtype=dtype, strides=None, device=device, kind="jax")
        for shape, dtype, device in (
            ((3, 32), "float16", "cuda:0"),
            ((4, 64, 32), "float16", "cuda:1"),
            ((3, 2), "int32", "cuda:0"),
        )
    )
    with pytest.raises(ArgumentError, match="w on cuda:1"):
        check_arguments(x, w, ids, w_scale=None, topk_weight=None, mode=None)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("backend", [name for name in backends.BACKENDS if backends.load(name).FRAMEWORK == "jax"])
@pytest.mark.parametrize("name", ["x", "w"])
def test_gaps_between_rows_are_refused_where_the_framework_has_no_strides(backend: str, name: str) -> None:
    import torch

    call = arguments("torch")
    array = call[name]
    wide = torch.zeros(*array.shape[:-1], K + 8, dtype=array.dtype)
    call[name] = wide[..., :K]
    with pytest.raises(ArgumentError, match=f"^{name}: got strides .* allowed: compact row-major"):
        backends.moe_gemm(**call, backend=backend, interpret=True)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("name", ["x", "w", "topk_weight"])
def test_no_gradient(name: str) -> None:
    import torch

    call = arguments("torch")
    call[name].requires_grad_()
    with pytest.raises(ArgumentError, match=f"^{name}: got a tensor that requires a gradient"):
        backends.moe_gemm(**call, interpret=True)
    with torch.no_grad(), pytest.raises(pytest.fail.Exception, match="was launched"):
        backends.moe_gemm(**call, interpret=True)


@pytest.mark.usefixtures("no_launch")
def test_torch_backend_under_jit_says_so() -> None:
    import jax

    call = arguments("jax")
    with pytest.raises(ArgumentError, match=re.escape("backend: got torch-triton under jax.jit")):
        jax.jit(lambda **given: backends.moe_gemm(**given, backend="torch-triton", interpret=True))(
            **{name: value for name, value in call.items() if value is not None}
        )


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_without_a_gpu_the_remedy_is_named(backend: str, kind: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        backends.moe_gemm(**arguments(kind), backend=backend)
    message = str(caught.value)
    assert message.startswith(f"backend {backend} cannot run here: ")
    assert "GPU" in message
    assert "interpret=True" in message


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_a_backend_that_cannot_run_is_named_with_reason_and_remedy(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = backends.load(backend)
    monkeypatch.setattr(module, "unavailable", lambda *, interpret: "libfoo is missing; install foo")
    with pytest.raises(BackendUnavailable, match=f"^backend {backend} cannot run here: libfoo is missing; install foo"):
        backends.moe_gemm(**arguments("numpy"), backend=backend, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_values_on_a_device_are_checked_when_asked(backend: str) -> None:
    call = {name: value if value is None else value.cuda() for name, value in arguments("torch").items()}
    call["topk_ids"][1, 1] = E
    y = backends.moe_gemm(**call, backend=backend)
    assert (y[1, 1] == 0).all()
    with pytest.raises(ArgumentError, match=re.escape("topk_ids: got 4 at [1, 1]")):
        backends.moe_gemm(**call, backend=backend, validate=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_arrays_on_the_wrong_side(backend: str, kind: str) -> None:
    with pytest.raises(ArgumentError, match="interpret=True for the CPU"):
        backends.moe_gemm(**arguments(kind), backend=backend)
    if kind == "torch":
        call = {name: value if value is None else value.cuda() for name, value in arguments(kind).items()}
        with pytest.raises(ArgumentError, match="interpret: got True with arrays on cuda"):
            backends.moe_gemm(**call, backend=backend, interpret=True)


# Config and names


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("block_m", 8, "a multiple of 16"),
        ("block_m", 0, "a multiple of 16"),
        ("block_m", 72, "a multiple of 16"),
        ("block_n", 48, "a power of two, 16 or more"),
        ("block_k", 0, "a power of two, 16 or more"),
        ("block_k", -64, "a power of two, 16 or more"),
        ("block_m", 16.0, "an int"),
        ("block_m", True, "an int"),
        ("block_n", "64", "an int"),
        ("num_warps", 3, "1, 2, 4, 8, 16, 32"),
        ("num_stages", 0, "1 to 16"),
        ("group_m", 0, "1 or more"),
        ("swap_ab", 1, "True or False"),
        ("ping_pong", "yes", "True or False"),
    ],
)
def test_config_refuses(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Config(**{field: value})
    assert str(caught.value).startswith(f"config.{field}: got {value!r}")
    assert allowed in str(caught.value)


def test_config_round_trip() -> None:
    config = Config(block_m=64, block_n=256, block_k=32, num_warps=8, num_stages=3, group_m=5, swap_ab=False)
    assert Config.from_json(config.to_json()) == config
    assert str(config) == "64x256x32 w8 s3 g5"
    assert str(config.replace(swap_ab=True)).endswith("swap")
    assert str(config.replace(ping_pong=True)).endswith("ping-pong")
    assert Config.from_json(config.replace(ping_pong=True).to_json()).ping_pong
    with pytest.raises(ArgumentError, match=r"unknown fields \['blockm'\].*block_m"):
        Config.from_mapping({"blockm": 16})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_m = 16  # type: ignore[misc]


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_what_a_backend_refuses_names_field_given_and_allowed(backend: str) -> None:
    """Every refusal of `unsupported` over a wide product reads "config...: got ...; allowed: ..."."""
    module = backends.load(backend)
    problems = [
        Problem.of(dtype, scale_layout=layout, tokens=64, experts=8, n=512, k=512, top_k=2)  # type: ignore[arg-type]
        for dtype, layout in (
            ("fp16", "channel"),
            ("fp8-w8a16", "block"),
            ("fp8-w8a8", "channel"),
            ("fp8-w8a8", "block"),
        )
    ]
    refusals = set()
    for problem in problems:
        for change_ in (
            {},
            {"block_k": 16},
            {"block_k": 256},
            {"block_n": 32},
            {"block_n": 512},
            {"block_m": 512},
            {"num_warps": 2},
            {"num_stages": 1},
            {"num_stages": 16},
            {"swap_ab": False},
            {"ping_pong": True},
            {"ping_pong": True, "num_warps": 8, "split_k": 2},
            {"ping_pong": True, "num_warps": 8, "block_m": 176},
            {"block_m": 256, "block_n": 256},
        ):
            refusal = module.unsupported(problem, Config(**{"num_stages": 3, **change_}))
            if refusal is not None:
                refusals.add(refusal)
    assert refusals
    for refusal in refusals:
        assert re.search(r"^config\b", refusal), refusal
        assert "allowed" in refusal, refusal


def test_a_limit_says_whose_it_is() -> None:
    """Without a GPU the limit is Hopper's, and not that of "this GPU"."""
    from backends import triton_launch

    problem = Problem.of("fp16", tokens=4, experts=2, n=256, k=64, top_k=1)
    config = Config(block_m=128, block_n=256, block_k=128, num_stages=4, num_warps=8)
    assert str(triton_launch.unsupported(problem, config)).endswith("allowed: 232448 on Hopper")
    assert str(triton_launch.unsupported(problem, config, 101_376)).endswith("allowed: 101376 on this GPU")


@pytest.mark.parametrize(
    ("look_up", "says"),
    [
        (
            lambda: models.model("mixtral-8x7"),
            ("model: got 'mixtral-8x7'", "gpt-oss-120b", "did you mean 'mixtral-8x7b'?"),
        ),
        (lambda: models.model("gpt-oss-120b").shape("gate"), ("gemm: got 'gate'", "gate-up, down")),
        (lambda: models.model("mixtral-8x7b").shape("down", tp=3), ("tp: got 3", "divisor of 14336")),
        (lambda: gpus.gpu("h300"), ("gpu: got 'h300'", "h200")),
        (lambda: Problem.of("fp8", tokens=1, experts=1, n=1, k=1, top_k=1), ("dtype: got 'fp8'", "fp16, bf16")),
        (lambda: routing.make("zipf", 1, 2, 1, seed=0), ("routing: got 'zipf'", "zipf-EXPONENT")),
        (lambda: routing.make("zipf-x", 1, 2, 1, seed=0), ("routing: got 'zipf-x'", "zipf-1.2")),
        (lambda: routing.uniform(4, 2, 3, seed=0), ("top_k: got 3", "1 to 2")),
        (
            lambda: backends.config_for(Problem.of("fp16", tokens=1, experts=1, n=1, k=1, top_k=1), backend="tpu"),
            ("backend: got 'tpu'", "torch-triton"),
        ),
    ],
)
def test_unknown_names_list_the_known(look_up: Callable[[], Any], says: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        look_up()
    for part in says:
        assert part in str(caught.value)


# What is no error


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_no_tokens_give_an_empty_result(backend: str, kind: str, dtype: str) -> None:
    call = {
        name: convert(array if array is None or name in ("w", "w_scale") else array[:0], kind)
        for name, array in numpy_arguments(dtype).items()
    }
    y = backends.moe_gemm(**call, backend=backend, interpret=True)
    assert tuple(y.shape) == (0, 2, N)
    assert y.dtype == call["x"].dtype
    assert type(y) is type(call["x"])


@NUMERICS
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("ids", [np.full((T, 2), -1), np.full((T, 2), 2)], ids=["all minus one", "one expert"])
def test_experts_without_tokens_and_slots_without_experts(backend: str, ids: np.ndarray) -> None:
    call = numpy_arguments() | {"topk_ids": ids.astype(np.int32)}
    y = backends.moe_gemm(**call, backend=backend, interpret=not HAS_GPU, validate=True)
    expected = np.einsum("tk,nk->tn", *(call[name][s].astype(np.float64) for name, s in (("x", slice(None)), ("w", 2))))  # type: ignore[index]
    expected = expected[:, None, :] * call["topk_weight"][:, :, None] * (ids >= 0)[:, :, None]  # type: ignore[index]
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=1e-3, atol=1e-3)
    assert np.count_nonzero(y) == (0 if ids[0, 0] < 0 else y.size)
