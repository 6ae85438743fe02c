"""Inputs and float64 reference of a case, made on the device by torch and shared with JAX through DLPack, uncopied.

The quantisers and the reference repeat `shared.fp8` and `shared.reference` in torch, as NumPy would take minutes for
gigabytes of weights; tests hold both to the spec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.cases import Case, Row
from shared import planning, routing
from shared.fp8 import FP8_MAX
from shared.problem import SCALE_BLOCK, Problem, ScaleLayout

if TYPE_CHECKING:
    import torch


REBATCH_SEED = 1 << 32


@dataclasses.dataclass
class Data:
    """Arrays of one problem, on the device; shapes as in shared/problem.py.

    counts:              (E,) slots per expert, host
    reference:           (T, top_k, N) float64, from the same (already quantised) weights
    reference_original:  the same from the weights and activations before quantisation; None without FP8
    """

    problem: Problem
    x: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    counts: np.ndarray
    reference: torch.Tensor
    reference_original: torch.Tensor | None

    def arrays(self, framework: str) -> dict[str, Any]:
        """{"x", "w", "topk_ids", "w_scale"} as that framework's arrays over the same memory."""
        found = {"x": self.x, "w": self.w, "topk_ids": self.topk_ids, "w_scale": self.w_scale}
        if framework == "jax":
            return {name: None if array is None else to_jax(array) for name, array in found.items()}
        return found

    def error(self, y: torch.Tensor) -> float:
        """||y - reference|| / ||reference||; NaN where an element was left unwritten (memory is poisoned before)."""
        return relative_error(y, self.reference)

    def quantisation_error(self, y: torch.Tensor) -> float | None:
        """The same against the weights and activations before quantisation: what a user of FP8 pays."""
        return None if self.reference_original is None else relative_error(y, self.reference_original)


def build(
    case: Case, dtype: str, scale_layout: ScaleLayout, *, device: str, seed: int = 0, route: str = "uniform"
) -> Data:
    """Random normal data (never zeros, which draw less power and run faster), routing by its name, all seeded.

    Weights have standard deviation K**-0.5, so that y is of order 1 and float16 does not overflow.
    """
    import torch

    problem = case.problem(dtype, scale_layout)
    ids = routing.make(route, problem.tokens, problem.experts, problem.top_k, seed=seed)
    counts = planning.expert_counts(ids, problem.experts)
    topk_ids = torch.from_numpy(ids).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    activation = getattr(torch, problem.activation)

    x = torch.randn(problem.tokens, problem.k, generator=generator, device=device).to(activation)
    w = _weights(problem, generator)
    w_scale, original = None, None
    if problem.is_fp8:
        original = reference(x, w, None, topk_ids, problem, quantised=False)
        w, w_scale = quantise(w, scale_layout)
    expected = reference(x, w, w_scale, topk_ids, problem)
    return Data(problem, x, w, w_scale, topk_ids, counts, expected, original)


def _weights(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """(E, N, K) in the dtype of x, not quantised; float32 is drawn for one expert at a time."""
    import torch

    activation = getattr(torch, problem.activation)
    w = torch.empty(problem.experts, problem.n, problem.k, dtype=activation, device=generator.device)
    for expert in range(problem.experts):
        values = torch.randn(problem.n, problem.k, generator=generator, device=generator.device)
        w[expert] = values.mul_(problem.k**-0.5)
    return w


def build_batches(
    cases: Sequence[Case],
    dtype: str,
    scale_layout: ScaleLayout,
    *,
    device: str,
    seed: int = 0,
    route: str = "uniform",
) -> dict[Case, Data]:
    """The data of several batches of one layer: they share the weights, and one pass over them is the reference of all.

    A batch is the same whichever others are beside it. Routing and active experts are those of `build`; weights and x
    are other draws.
    """
    import torch

    problems = [case.problem(dtype, scale_layout) for case in cases]
    ids = [routing.make(route, p.tokens, p.experts, p.top_k, seed=seed) for p in problems]
    activation = getattr(torch, problems[0].activation)
    w = _weights(problems[0], torch.Generator(device).manual_seed(seed))
    xs = []
    for problem in problems:
        generator = torch.Generator(device).manual_seed(seed + REBATCH_SEED + problem.tokens)
        xs.append(torch.randn(problem.tokens, problem.k, generator=generator, device=device).to(activation))

    all_x, all_ids = torch.cat(xs), torch.from_numpy(np.concatenate(ids)).to(device)
    together = dataclasses.replace(problems[0], tokens=all_x.shape[0])
    sizes = [problem.tokens for problem in problems]
    w_scale = None
    originals: Sequence[torch.Tensor | None] = [None] * len(cases)
    if together.is_fp8:
        originals = reference(all_x, w, None, all_ids, together, quantised=False).split(sizes)
        w, w_scale = quantise(w, scale_layout)
    expected = reference(all_x, w, w_scale, all_ids, together).split(sizes)
    found = {}
    for i, (case, problem) in enumerate(zip(cases, problems, strict=True)):
        topk_ids = torch.from_numpy(ids[i]).to(device)
        counts = planning.expert_counts(ids[i], problem.experts)
        found[case] = Data(problem, xs[i], w, w_scale, topk_ids, counts, expected[i], originals[i])
    return found


def rebatch(data: Data, case: Case, *, seed: int = 0, route: str = "uniform") -> Data:
    """Another batch over the same weights, which are gigabytes: `case` differs from data's in its tokens alone."""
    import torch

    problem = dataclasses.replace(data.problem, tokens=case.tokens)
    ids = routing.make(route, problem.tokens, problem.experts, problem.top_k, seed=seed)
    topk_ids = torch.from_numpy(ids).to(data.x.device)
    # A seed of its own: `build` drew the weights from the same stream, and rows of x that repeat rows of w make sums of
    # one sign, of which the FP8 unit loses far more than of random ones.
    generator = torch.Generator(data.x.device).manual_seed(seed + REBATCH_SEED)
    x = torch.randn(problem.tokens, problem.k, generator=generator, device=data.x.device).to(data.x.dtype)
    counts = planning.expert_counts(ids, problem.experts)
    expected = reference(x, data.w, data.w_scale, topk_ids, problem)
    return Data(problem, x, data.w, data.w_scale, topk_ids, counts, expected, None)


def quantise(w: torch.Tensor, scale_layout: ScaleLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(E, N, K) -> e4m3 weights and float32 scales, as shared.fp8 does; one expert at a time, to save memory."""
    import torch

    q = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    scales = []
    for expert in range(w.shape[0]):
        values = w[expert].float()
        scale = _scale_of(_amax(values, scale_layout))
        q[expert] = to_fp8(values / _expand(scale, scale_layout, values.shape))
        scales.append(scale)
    return q, torch.stack(scales)


def quantise_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, K), finite -> e4m3 and float32 power-of-two scales (T,), as shared.fp8.quantise_token does."""
    import torch

    values = x.float()
    bits = values.abs().amax(dim=1).view(torch.int32)
    exponent = (bits >> 23) - 127
    exponent = (exponent - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(min=-100)
    exponent = torch.where(bits == 0, 0, exponent)
    scale, inverse = (((e + 127) << 23).view(torch.float32) for e in (exponent, -exponent))
    return to_fp8(values * inverse[:, None]), scale


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    problem: Problem,
    *,
    quantised: bool = True,
) -> torch.Tensor:
    """shared.reference.moe_gemm_reference in torch, float64, one active expert at a time.

    quantised False: leave fp8-w8a8's activations as they are.
    """
    import torch

    activations = x.double()
    if problem.quantises_x and quantised:
        q, scale = quantise_token(x)
        activations = q.float().double() * scale.double()[:, None]
    shape = (problem.tokens, problem.top_k, problem.n)
    y = torch.zeros(shape, dtype=torch.float64, device=x.device)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        weights = w[expert].float().double()
        if w_scale is not None:
            layout = problem.scale_layout
            assert layout is not None
            weights *= _expand(w_scale[expert], layout, weights.shape).double()
        y[token, slot] = activations[token] @ weights.T
    return y


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    difference = float((y.double() - expected).norm())
    norm = float(expected.norm())
    return difference / norm if norm > 0 else difference


def to_jax(tensor: torch.Tensor) -> Any:
    """JAX array over the same memory. The caller has synchronised torch's stream."""
    import jax

    return jax.dlpack.from_dlpack(tensor)


def to_torch(array: Any) -> torch.Tensor:
    """torch tensor over the same memory; torch tensors come back as they are."""
    import torch

    return array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)


class DataCache:
    """Keeps the data of one (case, dtype, scale layout) at a time; frees it before the next is made."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self.key: tuple[object, ...] | None = None
        self._data: Data | None = None

    def key_of(self, case: Case, dtype: str, scale_layout: ScaleLayout) -> tuple[object, ...]:
        """What data that is kept together has in common."""
        return case, dtype, scale_layout

    def get(self, case: Case, dtype: str, scale_layout: ScaleLayout) -> Data:
        key = self.key_of(case, dtype, scale_layout)
        if key != self.key or self._data is None:
            self.free()
            self._data = self._make(case, dtype, scale_layout)
            self.key = key
        return self._data

    def free(self) -> None:
        import gc

        import torch

        self._clear()
        gc.collect()  # JAX arrays and captured graphs refer to each other in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _clear(self) -> None:
        self._data = self.key = None


class BatchCache(DataCache):
    """Keeps the data of all batches of one layer and dtype at a time, as `build_batches` makes them."""

    def __init__(self, make: Callable[..., dict[Case, Data]], rows: Iterable[Row]) -> None:
        """rows: what will be measured; batches that none of them has are not made."""
        super().__init__(make)
        self._cases: dict[tuple[object, ...], dict[Case, None]] = {}
        for row in rows:
            self._cases.setdefault(self.key_of(row.case, row.dtype, row.scale_layout), {})[row.case] = None
        self._batches: dict[Case, Data] = {}

    def key_of(self, case: Case, dtype: str, scale_layout: ScaleLayout) -> tuple[object, ...]:
        return case.model, case.gemm, dtype, scale_layout

    def get(self, case: Case, dtype: str, scale_layout: ScaleLayout) -> Data:
        key = self.key_of(case, dtype, scale_layout)
        if key != self.key:
            self.free()
            self._batches = self._make(list(self._cases[key]), dtype, scale_layout)
            self.key = key
        return self._batches[case]

    def _clear(self) -> None:
        super()._clear()
        self._batches = {}


def _amax(values: torch.Tensor, scale_layout: ScaleLayout) -> torch.Tensor:
    """Largest magnitude per output channel (N,), or per block (ceil(N/128), ceil(K/128)), of one expert (N, K)."""
    import torch

    if scale_layout == "channel":
        return values.abs().amax(dim=1)
    n, k = values.shape
    padding = (0, -k % SCALE_BLOCK, 0, -n % SCALE_BLOCK)
    padded = torch.nn.functional.pad(values.abs(), padding)
    blocks = padded.view(padded.shape[0] // SCALE_BLOCK, SCALE_BLOCK, padded.shape[1] // SCALE_BLOCK, SCALE_BLOCK)
    return blocks.amax(dim=(1, 3))


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    import torch

    tiny = torch.finfo(torch.float32).tiny
    largest = torch.full_like(amax, FP8_MAX)  # a tensor: by a Python number, CUDA multiplies with its reciprocal
    return torch.where(amax > 0, (amax / largest).clamp(min=tiny), 1.0)


def _expand(scale: torch.Tensor, scale_layout: ScaleLayout, shape: tuple[int, ...]) -> torch.Tensor:
    """One expert's scales, broadcastable to its weights (N, K)."""
    if scale_layout == "channel":
        return scale[:, None]
    n, k = shape
    return scale.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
