"""Run one example on its backend: compiled on the GPU, or in the backend's interpreter on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import backends
from backends import arrays as carry
from bench import gathering
from bench.fuzz import judge
from bench.fuzz.example import Draw, Example, Program
from bench.fuzz.values import Arrays, arrays
from shared.checks import ArgumentError

NAN = float("nan")


class Refused(Exception):
    """The backend cannot run this program here, and said so."""


class Runner:
    """One program, made ready for several draws of data; JAX traces and compiles it once."""

    def __init__(self, program: Program, *, interpret: bool) -> None:
        self.program, self.interpret = program, interpret
        self.module = backends.load(program.backend)
        for reason in (
            self.module.unavailable(interpret=interpret),
            self.module.unsupported(program.problem, program.config),
        ):
            if reason is not None:
                raise Refused(reason)
        call: Any = functools.partial(
            self.module.moe_gemm, problem=program.problem, order=program.order, config=program.config,
            interpret=interpret, fill=NAN,
        )  # fmt: skip
        if self.module.FRAMEWORK == "jax":
            import jax

            call = jax.jit(call)
        self._call = call

    def check(self, draw: Draw) -> None:
        """Raises judge.Wrong where the result is not right, Refused where the compiled kernel does not fit the GPU."""
        example = Example(program=self.program, draw=draw)
        given = arrays(example)
        try:
            y = self._compute(given)
            again = None if self.interpret or not self.program.config.deterministic else self._compute(given)
        except ArgumentError as error:
            raise Refused(str(error)) from error
        judge.check(y, example, given, interpret=self.interpret)
        if again is not None and y.tobytes() != again.tobytes():
            different = int((y.view(np.uint16) != again.view(np.uint16)).sum())
            raise judge.Wrong(f"a second call differs in {different} of {y.size} elements")

    def _compute(self, given: Arrays) -> np.ndarray:
        with gathering.forced(self.program.gathers):
            return self._through_the_door(given) if self.program.door else self._directly(given)

    def _directly(self, given: Arrays) -> np.ndarray:
        native = [None if a is None else self._native(a) for a in (given.x, given.w, given.topk_ids)]
        native += [None if a is None else self._native(a) for a in (given.w_scale, given.topk_weight)]
        if self.module.FRAMEWORK == "torch":
            native[0] = _spaced(native[0], self.program.x_gap)
            native[1] = _spaced(native[1], self.program.w_gap)
        popularity = None if given.popularity is None else self._native(given.popularity)
        return carry.to_host(self._call(*native, popularity=popularity))

    def _native(self, array: np.ndarray) -> Any:
        return carry.to_framework(array, self.module.FRAMEWORK, on_gpu=not self.interpret)

    def _through_the_door(self, given: Arrays) -> np.ndarray:
        program = self.program
        return backends.moe_gemm(
            given.x, given.w, given.topk_ids, w_scale=given.w_scale, topk_weight=given.topk_weight,
            mode=program.problem.dtype, order=program.order, config=program.config, backend=program.backend,
            popularity=given.popularity, interpret=self.interpret,
        )  # fmt: skip


def check(example: Example, *, interpret: bool) -> None:
    Runner(example.program, interpret=interpret).check(example.draw)


def _spaced(tensor: Any, gap: int) -> Any:
    """The same values with `gap` elements of NaN after each row, and after each expert's last row as many rows."""
    if not gap:
        return tensor
    import torch

    itemsize = tensor.element_size()
    carrier = torch.uint8 if itemsize == 1 else torch.int16  # e4m3 has no fill; 0x7f and 0x7fff are NaN
    shape = list(tensor.shape)
    shape[-1] += gap
    if tensor.dim() == 3:
        shape[-2] += gap
    wide = torch.full(shape, 0x7F if itemsize == 1 else 0x7FFF, dtype=carrier, device=tensor.device)
    inner = wide[..., : tensor.shape[-2], : tensor.shape[-1]]
    inner.copy_(tensor.view(carrier))
    return inner.view(tensor.dtype)
