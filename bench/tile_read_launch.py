"""How the kernel of tile_read_kernel.py is launched, behind a call's own planning, and what each step must give."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backends import torch_triton, triton_launch
from backends.compiled import Compiled
from bench import reads, variant_launch
from shared import planning
from shared.checks import ArgumentError
from shared.config import Config
from shared.problem import Problem

if TYPE_CHECKING:
    import torch

    from bench.data import Data

STEPS = {
    "contiguous": {"CONTIGUOUS": True, "PLANNED": False, "GATHER_X": False, "PRODUCT": False},
    "tiles": {"CONTIGUOUS": False, "PLANNED": False, "GATHER_X": False, "PRODUCT": False},
    "behind the plan": {"CONTIGUOUS": False, "PLANNED": True, "GATHER_X": False, "PRODUCT": False},
    "with x": {"CONTIGUOUS": False, "PLANNED": True, "GATHER_X": True, "PRODUCT": False},
    "with the product": {"CONTIGUOUS": False, "PLANNED": True, "GATHER_X": True, "PRODUCT": True},
}
PRODUCT = "with the product"
_WORD = 4
"""Bytes of the int32 that are added up."""


def unsupported(problem: Problem, config: Config) -> str | None:
    """Why the kernel cannot be the GEMM kernel at this config; None if it can."""
    if triton_launch.tail_rows(config.block_m):
        return f"config.block_m: got {config.block_m}; allowed for tile reads: a power of two"
    if not config.swap_ab or config.parts(problem.k) > 1:
        return f"config: got {config}; allowed for tile reads: weights on the left (swap), K in one part"
    if problem.n % config.block_n:
        return f"config.block_n: got {config.block_n}; allowed for tile reads: a divisor of N = {problem.n}"
    if problem.k * problem.w_itemsize % _WORD or problem.x_itemsize != problem.w_itemsize:
        return f"problem: got {problem.dtype}, K = {problem.k}; allowed for tile reads: x as wide as w, rows of int32"
    return triton_launch.unsupported(problem, config)


def constants(problem: Problem, config: Config, step: str) -> dict[str, Any]:
    """Compile-time arguments; K and BLOCK_K in int32, with the product in weights."""
    each = 1 if step == PRODUCT else _WORD // problem.w_itemsize
    return {
        "N": problem.n, "K": problem.k // each, "TOP_K": problem.top_k, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k // each, "STAGES": config.num_stages, **STEPS[step],
    }  # fmt: skip


@dataclasses.dataclass
class Reader:
    """All steps of one problem at one config. Each call plans and quantises x first, as `moe_gemm` does."""

    data: Data
    config: Config
    interpret: bool

    def __post_init__(self) -> None:
        import torch

        problem, x, w = self.data.problem, self.data.x, self.data.w
        if (reason := unsupported(problem, self.config)) is not None:
            raise ArgumentError(reason)
        strides = (torch_triton._row_stride(x), *w.stride()[:2])
        work = torch_triton._work(problem, "column", self.config, "none", *strides, False, x.dtype, w.dtype, x.device)
        made = {name: torch.empty(shape, device=x.device, dtype=dtype) for name, shape, dtype in work.buffers}
        self._planning = work.steps[0]
        self._buffers: dict[str, Any] = {"x": x, "w": w, "topk_ids": self.data.topk_ids, **made}
        self.rows = planning.tile_rows_in_use(self.data.counts, self.config.block_m)
        self.tile_cols = problem.n // self.config.block_n
        self.weight_bytes = self.rows * problem.n * problem.k * problem.w_itemsize
        self.programs_per_sm: dict[str, int] = {}
        self.sums = torch.empty(self.rows * self.tile_cols, device=x.device, dtype=torch.int32)
        self._x = made.get("scaled", x)

    def __call__(self, step: str) -> torch.Tensor:
        """Sums (rows * tile_cols,) int32, or y (T, top_k, N) of the product, unscaled."""
        import torch

        launch = torch_triton._launch_interpreted if self.interpret else torch_triton._launch
        first, problem = self._planning, self.data.problem
        arguments = (*(self._buffers[name] for name in first.buffers), *first.numbers)
        launch(first.kernel, first.grid, arguments, first.constants)
        out: torch.Tensor = self._buffers["y"] if step == PRODUCT else self.sums
        x, w = (self._x, self.data.w) if step == PRODUCT else (a.view(torch.int32) for a in (self._x, self.data.w))
        plan = (self._buffers[name] for name in ("sorted_slot", "tile_expert", "tile_rows"))
        rows = problem.max_tile_rows(self.config.block_m) if STEPS[step]["PLANNED"] else self.rows
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        arguments = (x, w, *plan, out, self.rows, problem.slots)
        compiled = _run(
            self.interpret, rows * self.tile_cols, arguments, constants(problem, self.config, step) | options
        )
        if compiled is not None and step not in self.programs_per_sm:
            sms = torch.cuda.get_device_properties(x.device).multi_processor_count
            self.programs_per_sm[step] = variant_launch._resident_programs(compiled) // sms
        return out

    def plain_read(self, design: reads.Design, sms: int) -> torch.Tensor:
        """Sums of a plain read of as many weights, a program each."""
        import torch

        torch_triton._bind_context(self.data.w.device)
        words = self.data.w[: self.rows].view(torch.int32).view(-1)
        sums = torch.empty(reads.programs_of(design, self.weight_bytes, sms), dtype=torch.int32, device=words.device)
        reads.read(words, sums, design, sms)
        return sums

    def check_plain(self, call: Callable[[], torch.Tensor]) -> None:
        """Raises AssertionError where a plain read's sums are not those of the weights."""
        found, expected = (int(sums.sum()) % (1 << 32) for sums in (call().long(), self._of_w[: self.rows]))
        assert found == expected, f"sum {found}, of torch {expected}"

    def check(self, step: str) -> None:
        """Raises AssertionError where a step does not give what it must; memory is poisoned before."""
        import torch

        from shared.reference import error_bound

        (self._buffers["y"] if step == PRODUCT else self.sums).fill_(-1)
        found = self(step)
        if step == PRODUCT:
            error, bound = self.data.error(self._scaled(found)), error_bound(self.data.problem)
            assert error <= bound, f"error {error:.2e} is above its bound {bound:.2e}"
            return
        wrong = int((found != self.expected(step)).sum())
        assert torch.equal(found, self.expected(step)), f"{wrong} of {found.numel()} tiles have other sums than torch's"

    def _scaled(self, y: torch.Tensor) -> torch.Tensor:
        """y of the GEMM from sums of products of quantised values, float64."""
        if not self.data.problem.scales_x:
            return y
        scales = self.data.w_scale[self.data.topk_ids.long()].double()  # type: ignore[index]
        return y.double() * scales * self._buffers["x_scale"].double()[:, None, None]

    def expected(self, step: str) -> torch.Tensor:
        """The sums that torch makes of what a step reads, after a call: modulo 2**32, as the kernel's are."""
        import torch

        switches, slots = STEPS[step], self.data.problem.slots
        experts = self._buffers["tile_expert"][: self.rows].long()
        if not switches["PLANNED"]:
            experts = torch.arange(self.rows, device=experts.device)
        of_w = self._of_w[experts]
        slot = self._buffers["sorted_slot"][: self.rows * self.config.block_m].view(self.rows, -1).long()
        if switches["PLANNED"]:
            of_w = of_w + torch.where(slot < slots, slot, 0).sum(1, keepdim=True)
        if switches["GATHER_X"]:
            of_token = self._x.view(torch.int32).sum(1, dtype=torch.int64)
            token = slot.clamp(max=slots - 1) // self.data.problem.top_k
            of_w = of_w + torch.where(slot < slots, of_token[token], 0).sum(1, keepdim=True)
        return of_w.T.reshape(-1).to(torch.int32)  # column order: program = row + rows * column

    @functools.cached_property
    def _of_w(self) -> torch.Tensor:
        """(E, tile_cols) int64: the sum of each strip of BLOCK_N channels."""
        import torch

        words = self.data.w.view(torch.int32)
        return words.view(len(words), self.tile_cols, -1).sum(2, dtype=torch.int64)


def _run(interpret: bool, grid: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The kernel as Triton compiled it; None in the interpreter."""
    if interpret:
        from backends import triton_interpreter

        with triton_interpreter.interpreting():
            shipped = ("gather_rows", "load_x", "multiply", "store", "zeros")
            kernels = triton_interpreter.twin("bench.tile_read_kernel", shipped)
            kernels.moe_gemm_kernel_tile_read[(grid,)](*arguments, **options)
        return None
    from bench.tile_read_kernel import moe_gemm_kernel_tile_read

    return moe_gemm_kernel_tile_read[(grid,)](*arguments, **options)


def compile_only(problem: Problem, config: Config, step: str) -> Compiled:
    """A step's kernel compiled for sm_90 without a device."""
    from bench.tile_read_kernel import moe_gemm_kernel_tile_read as kernel

    types = ["*i32"] * 6 + ["i32"] * 2
    if step == PRODUCT:
        types[:2] = f"*{triton_launch.x_type(problem)}", f"*{triton_launch.w_type(problem)}"
        types[5] = f"*{triton_launch.TYPES[problem.activation]}"
    return triton_launch.compile_kernel(kernel, types, constants(problem, config, step), config)
