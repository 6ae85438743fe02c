"""Layers of a decode step, for `bench.launch_cost`: their arrays, and all of them in one CUDA graph or one jax.jit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from shared.models import Model

JAX_LAYERS = 8
"""Layers in one jax.jit, of which each costs XLA compile time; a CUDA graph has as many as the model."""
L2_MULTIPLE = 4
MOST_BYTES = 24 << 30
"""Weights that one cell holds, copies included."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a decode step: its inputs are its own, its weights are shared with every `copies`-th layer."""

    arguments: tuple[Any, ...]


def layers_of_a_step(of: Model, framework: str) -> int:
    """All MoE layers of the model; inside jax.jit no more than JAX_LAYERS."""
    return min(JAX_LAYERS, of.layers) if framework == "jax" else of.layers


def layers(contender: Any, data: Any, device: Any, count: int) -> tuple[list[Layer], int]:
    """So many layers, of which none finds its weights in L2, as those before it read others; and copies of the weights.

    A copy comes again after L2_MULTIPLE times L2, or as far as MOST_BYTES lets it. Inputs are each layer's own: XLA
    would plan equal ones once.
    """
    from bench.data import to_jax

    l2 = 0 if device.interpret else _l2_bytes()
    read = max(1, data.problem.weight_bytes(data.counts.tolist()))
    weights = data.w.numel() * data.w.element_size()
    copies = max(2, min(count, -(-L2_MULTIPLE * l2 // read), MOST_BYTES // weights))
    own: list[Any] = [data.w, *(data.w.clone() for _ in range(copies - 1))]
    inputs = [
        {name: array if array is None or name == "w" else array.clone() for name, array in data.arrays("torch").items()}
        for _ in range(count)
    ]
    device.synchronize()  # before another framework's stream reads them
    convert: Callable[[Any], Any] = to_jax if contender.framework == "jax" else lambda array: array
    own = [convert(w) for w in own]
    found = []
    for i, arrays in enumerate(inputs):
        native = {name: own[i % copies] if name == "w" else convert(a) for name, a in arrays.items() if a is not None}
        found.append(Layer(tuple(native.values())))
    return found, copies


def _l2_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).L2_cache_size


def in_cuda_graph(contender: Any, layers: Sequence[Layer], device: Any) -> Callable[[], Any]:
    """All layers in one CUDA graph."""
    import torch

    from bench.contenders import CannotRun

    def step() -> list[Any]:
        return [contender.call(*layer.arguments) for layer in layers]

    if device.interpret:
        return step
    step()
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results_of = step()
    except RuntimeError as error:
        raise CannotRun(f"cannot be captured in a CUDA graph: {error}") from error

    def replay() -> Any:
        graph.replay()
        return results_of[-1]

    return replay


def in_jit(contender: Any, layers: Sequence[Layer]) -> Callable[[], Any]:
    """All layers inside one jax.jit, each after the one before it, as a model's are.

    All results are returned: XLA leaves out a layer whose result no one reads.
    """
    import jax

    @jax.jit
    def step(every: tuple[tuple[Any, ...], ...]) -> Any:
        results_of: list[Any] = []
        for arguments in every:
            if results_of:
                *arguments, results_of[-1] = jax.lax.optimization_barrier((*arguments, results_of[-1]))  # type: ignore[assignment]
            results_of.append(contender.call(*arguments))
        return results_of

    every = tuple(layer.arguments for layer in layers)
    return lambda: step(every)
