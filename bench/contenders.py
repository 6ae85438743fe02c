"""Backends and peers behind one interface: something that can be called, captured and checked."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bench import peers
from bench.cases import Row
from bench.data import Data, to_torch
from bench.machine import Device
from shared import planning
from shared.config import Config

if TYPE_CHECKING:
    import torch


TRIALS = 5
"""Calls by which the fastest of a library's ways is chosen, before anything is timed."""


class CannotRun(Exception):
    """This row cannot be measured here; the message says why and what to do."""


@dataclasses.dataclass
class Contender:
    """A row made ready. `call(*arguments)` computes y on the device and does not wait.

    kernel_name: substring of the names of the GEMM kernel and of those that a split K needs besides; None: all kernels
                 of a call count (peers)
    to_y:        the result of a call -> torch (T, top_k, N)
    tile_rows:   tile rows in use at this config; None for peers
    about:       where the config comes from; of a peer, its version and config, where it tells them
    captured:    what `capture` made, once it has
    records:     GPU records of one eager call, once that is known
    """

    row: Row
    framework: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    to_y: Callable[[Any], torch.Tensor]
    kernel_name: str | None
    config: Config | None
    tile_rows: int | None
    captured: Callable[[], Any] | None = None
    records: int | None = None
    about: str | None = None

    def eager(self) -> Any:
        return self.call(*self.arguments)


def prepare(row: Row, data: Data, device: Device, *, config: Config | None = None) -> Contender:
    """The row's contender; raises CannotRun where it is not to be had. config None: the best known one."""
    device.synchronize()  # data is ready before another framework's stream reads it
    if row.contender in peers.PEERS:
        peer = peers.PEERS[row.contender]
        try:
            ready = peer.prepare(data, row.case.gemm)
        except (NotImplementedError, AttributeError) as error:
            raise CannotRun(str(error)) from error
        contender = Contender(
            row, peer.framework, ready.call, ready.arguments, lambda y: ready.to_y(data, y),
            kernel_name=ready.kernel_name, config=None, tile_rows=None, about=ready.about,
        )  # fmt: skip
        return fastest_way(contender, ready.ways, device) if len(ready.ways) > 1 else contender
    return _prepare_backend(row, data, device, config)


def fastest_way(contender: Contender, ways: Mapping[str, Callable[..., Any]], device: Device) -> Contender:
    """The contender by that of these calls which has the shortest kernel time of a few cold calls; `about` names it.

    By the GPU's clock: the host's tells kernels that are shorter than a dispatch apart by chance.
    """
    from bench.measure import gpu_sample  # which samples contenders

    of = {name: dataclasses.replace(contender, call=way) for name, way in ways.items()}
    medians = {name: statistics.median(gpu_sample(one, device) for _ in range(TRIALS)) for name, one in of.items()}
    best = min(medians, key=lambda name: medians[name])
    about = f"{best}, the fastest of {len(medians)}"
    return dataclasses.replace(of[best], about=f"{contender.about}: {about}" if contender.about else about)


def _prepare_backend(row: Row, data: Data, device: Device, config: Config | None) -> Contender:
    import backends
    from backends import registry

    try:
        module = registry.load(row.contender)
    except ImportError as error:
        raise CannotRun(f"{row.contender}: {error}") from error
    reason = module.unavailable(interpret=device.interpret)
    if reason is not None:
        raise CannotRun(reason)
    about = "given"
    if config is None:
        choice = backends.choose_config(data.problem, backend=row.contender)
        config, about = choice.config, choice.source
    reason = module.unsupported(data.problem, config)
    if reason is not None:
        raise CannotRun(reason)

    names, arrays = [], []
    for name, array in data.arrays(module.FRAMEWORK).items():
        if array is not None:
            names.append(name)
            arrays.append(array)

    def call(*arguments: Any) -> Any:
        return backends.moe_gemm(
            **dict(zip(names, arguments, strict=True)),
            mode=row.dtype,
            order=row.order,
            config=config,
            backend=row.contender,
            interpret=device.interpret,
        )

    # The kernels that a split K needs carry the GEMM kernel's name, but those by which XLA clears and rounds what
    # pallas-mosaic adds up in memory: all that its call launches counts then.
    unnamed = row.contender == "pallas-mosaic" and config.reduction_of(data.problem.k) not in ("none", "two-pass")
    tile_rows = planning.tile_rows_in_use(data.counts, config.block_m)
    return Contender(
        row, module.FRAMEWORK, call, tuple(arrays), to_torch, kernel_name=None if unnamed else module.KERNEL_NAME,
        config=config, tile_rows=tile_rows, about=about,
    )  # fmt: skip


def capture(contender: Contender, device: Device) -> Callable[[], Any]:
    """The call without its host work: a CUDA graph's replay, or a call of one outer jax.jit. Raises CannotRun.

    Arrays are arguments of the jitted function: closed over, XLA could fold them as constants. Kept with the
    contender, so that kernel time and call time share one capture.
    """
    if contender.captured is None:
        contender.captured = (
            _capture_jax(contender) if contender.framework == "jax" else _capture_torch(contender, device)
        )
    return contender.captured


def _capture_jax(contender: Contender) -> Callable[[], Any]:
    import jax

    jitted = jax.jit(contender.call)
    jax.block_until_ready(jitted(*contender.arguments))
    return lambda: jitted(*contender.arguments)


def _capture_torch(contender: Contender, device: Device) -> Callable[[], Any]:
    import torch

    if device.interpret:
        return contender.eager
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is compiled or allocated on first use is done outside the graph
        contender.eager()
    torch.cuda.current_stream().wait_stream(stream)
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX's threads may use CUDA meanwhile
            y = contender.eager()
    except RuntimeError as error:
        raise CannotRun(f"cannot be captured in a CUDA graph: {error}") from error

    def replay() -> Any:
        graph.replay()
        return y

    return replay


def wait(result: Any, framework: str, device: Device) -> Any:
    """Wait for a call's result: JAX may still be launching it from a thread when the GPU is idle."""
    if framework == "jax":
        import jax

        jax.block_until_ready(result)
    device.synchronize()
    return result


def poisoned(contender: Contender, data: Data, device: Device, call: Callable[[], Any]) -> torch.Tensor:
    """y of one call into memory that held NaN, so that an element left unwritten shows in its error.

    A captured torch call writes where it wrote before: that result is overwritten with NaN. Otherwise a result's worth
    of NaN is allocated and freed in the framework's allocator, which hands the same block to the call.
    """
    import torch

    if contender.framework == "torch":
        if call is contender.captured:
            wait(call(), "torch", device).fill_(float("nan"))
        else:
            torch.full_like(data.reference, float("nan"), dtype=data.x.dtype)
    else:
        import jax.numpy as jnp

        jnp.full(data.reference.shape, jnp.nan, data.problem.activation).block_until_ready()
    device.synchronize()
    return contender.to_y(wait(call(), contender.framework, device))
