"""The list of backends. A new one is one file and one line here; tests and benchmarks pick it up by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

from backends.compiled import Compiled
from shared.checks import check_name
from shared.config import Config
from shared.problem import Problem

_MODULES = {
    "torch-triton": "backends.torch_triton",
    "jax-triton": "backends.jax_triton",
    "pallas-triton": "backends.pallas_triton",
    "pallas-mosaic": "backends.pallas_mosaic",
}
BACKENDS = tuple(_MODULES)


Again = Callable[[Any, Any, Any, Any, Any, Any], Any]
"""y of other arrays (x, w, topk_ids, w_scale, topk_weight, popularity) that differ from an earlier call's in addresses
and values alone; None where these cannot be had so, and `Backend.moe_gemm` has to be called."""


class Backend(Protocol):
    """What a backend's module has. Arrays are those of its FRAMEWORK, already checked; T >= 1."""

    NAME: str
    FRAMEWORK: str  # "torch" or "jax"
    KERNEL_NAME: str  # by which a profiler recognises its GEMM kernel

    def unavailable(self, *, interpret: bool) -> str | None: ...

    def unsupported(self, problem: Problem, config: Config) -> str | None: ...

    def moe_gemm(
        self,
        x: Any,
        w: Any,
        topk_ids: Any,
        w_scale: Any,
        topk_weight: Any,
        *,
        problem: Problem,
        order: str,
        config: Config,
        interpret: bool = False,
        fill: float | None = None,
        popularity: Any = None,
    ) -> Any: ...

    def again(
        self,
        x: Any,
        w: Any,
        topk_ids: Any,
        w_scale: Any,
        topk_weight: Any,
        popularity: Any,
        *,
        problem: Problem,
        order: str,
        config: Config,
    ) -> Again | None:
        """Of a torch backend only: how a call is made again that `moe_gemm` has just made; None where it cannot be."""
        ...

    def compile_only(self, problem: Problem, order: str, config: Config) -> Compiled: ...


class BackendUnavailable(RuntimeError):
    """A backend that cannot run here; the message has the reason and the remedy."""


def load(name: str) -> Backend:
    """The backend's module; ArgumentError, listing the known names, if there is none of that name."""
    check_name("backend", name, BACKENDS)
    return _load(name)


@functools.cache
def _load(name: str) -> Backend:
    # A module imports its framework only inside its functions, so that this works wherever the project does.
    return importlib.import_module(_MODULES[name])  # type: ignore[return-value]
