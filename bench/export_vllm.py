"""Tuned tiles as the config files of vLLM's fused MoE kernel.

vLLM looks a file up by E, N (a layer's intermediate size on one rank, half of gate-up's output), GPU and dtype; it maps
numbers of tokens to tiles, and the nearest number of tokens counts. `check` holds a file to what vLLM 0.33 reads.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.triton_launch import power_of_two, tail_rows
from shared.checks import ArgumentError
from shared.config import Config
from shared.models import models
from shared.problem import Problem

SELECTORS = {"fp16": "", "fp8-w8a8": ",dtype=fp8_w8a8"}
"""dtype here -> that part of the file's name there. Its Triton kernel has no fp8-w8a16; 16-bit dtypes share a file."""
FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
"""Fields of one number of tokens in the files that vLLM 0.33 ships for NVIDIA GPUs; each is an int."""
OPTIONAL = ("num_ctas", "SPLIT_K")
"""Fields that some of its files have besides; only 1 means what leaving it out means."""
_POWERS_OF_TWO = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")


@dataclasses.dataclass(frozen=True)
class Exported:
    """paths written; notes: what the reader of the files should know of their tiles."""

    paths: list[Path]
    notes: list[str]


def export(tuned: Path, folder: Path) -> Exported:
    """torch-triton's entries for gate-up in a file of backends/tuned, as one vLLM file a layer shape and dtype.

    Raises ArgumentError where there are none, or where two entries claim the same place.
    """
    content = json.loads(tuned.read_text(encoding="utf-8"))
    files: dict[str, dict[str, dict[str, int]]] = {}
    left_out: dict[str, list[int]] = {}
    otherwise: dict[str, list[int]] = {}
    in_one_block: dict[str, list[int]] = {}
    for entry in content["entries"]:
        if entry["backend"] != "torch-triton" or entry["dtype"] not in SELECTORS or not _is_gate_up(entry):
            continue
        if entry["scale_layout"] not in (None, "channel"):
            continue
        # Its tiles have a power of two of rows; where the best tile here has not, the best of those that have is taken.
        config, problem = Config.from_mapping(entry.get("one_block", entry["config"])), _problem(entry)
        name = file_name(entry["experts"], entry["n"] // 2, content["gpu"], SELECTORS[entry["dtype"]])
        where = f"{name}, {entry['tokens']} tokens"
        if config.parts(problem.k) > 1 or tail_rows(config.block_m):
            left_out.setdefault(name, []).append(entry["tokens"])
            continue
        batches = files.setdefault(name, {})
        if str(entry["tokens"]) in batches:
            raise ArgumentError(f"{tuned}: two entries for {where}; allowed: one (they differ in K or top_k)")
        batches[str(entry["tokens"])] = tiles(config, problem)
        if "one_block" in entry:
            in_one_block.setdefault(name, []).append(entry["tokens"])
        if config.swap_ab != swaps(entry["dtype"], config):
            otherwise.setdefault(name, []).append(entry["tokens"])
    if not files:
        raise ArgumentError(f"{tuned}: no entries of torch-triton for gate-up in {', '.join(SELECTORS)}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, batches in sorted(files.items()):
        ordered = {tokens: batches[tokens] for tokens in sorted(batches, key=int)}
        check(ordered, name)
        path = folder / name
        path.write_text(json.dumps(ordered, indent=4) + "\n", encoding="utf-8")
        paths.append(path)
    notes = [
        f"{name}, {_listed(tokens)} tokens: left out, as they split K or have two blocks of rows"
        for name, tokens in left_out.items()
    ]
    notes += [
        f"{name}, {_listed(tokens)} tokens: the best tile of one block of rows; the tuned one has two"
        for name, tokens in in_one_block.items()
    ]
    notes += [
        f"{name}, {_listed(tokens)} tokens: timed with operands in the other order than vLLM's; time it there"
        for name, tokens in otherwise.items()
    ]
    return Exported(paths, notes)


def _listed(tokens: list[int]) -> str:
    return ", ".join(map(str, sorted(tokens)))


def tiles(config: Config, problem: Problem) -> dict[str, int]:
    """One batch's entry. Column order is a band of all tile rows: GROUP_SIZE_M is the power of two that holds them."""
    rows = problem.max_tile_rows(config.block_m)
    values = (config.block_m, config.block_n, config.block_k, power_of_two(rows))
    return dict(zip(FIELDS, (*values, config.num_warps, config.num_stages), strict=True))


def swaps(dtype: str, config: Config) -> bool:
    """Whether vLLM's kernel takes weights as the left operand on Hopper: it decides so by dtype and tile."""
    return dtype == "fp8-w8a8" and config.block_m < 64 and config.block_n >= 64


def file_name(experts: int, intermediate: int, gpu: str, selector: str) -> str:
    """As vLLM names it: GPUs of the H200 family share one name."""
    device = re.sub(r"[\s/]+", "_", gpu)
    if "H200" in device.split("_"):
        device = "NVIDIA_H200"
    return f"E={experts},N={intermediate},device_name={device}{selector}.json"


def check(content: Mapping[str, Any], name: str) -> None:
    """ArgumentError where vLLM could not read the file, or would read something else than it says."""
    for tokens, entry in content.items():
        where = f"{name}: {tokens!r}"
        if not tokens.isdecimal() or int(tokens) < 1:
            raise ArgumentError(f"{where}: allowed: a number of tokens, 1 or more")
        if missing := [field for field in FIELDS if field not in entry]:
            raise ArgumentError(f"{where}: lacks {', '.join(missing)}")
        if unknown := sorted(set(entry) - {*FIELDS, *OPTIONAL}):
            raise ArgumentError(f"{where}: has {', '.join(unknown)}; allowed: {', '.join((*FIELDS, *OPTIONAL))}")
        for field, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{where}: {field} is {value!r}; allowed: an int, 1 or more")
            if field in OPTIONAL and value != 1:
                raise ArgumentError(f"{where}: {field} is {value}; allowed: 1")
            if field in _POWERS_OF_TWO and value & (value - 1):
                raise ArgumentError(f"{where}: {field} is {value}; allowed: a power of two")
        if any(entry[field] < 16 for field in FIELDS[1:3]) or entry[FIELDS[0]] < 8:
            raise ArgumentError(f"{where}: tile {[entry[f] for f in FIELDS[:3]]}; allowed: 8 x 16 x 16 or more")


def _problem(entry: Mapping[str, Any]) -> Problem:
    shape = {name: entry[name] for name in ("tokens", "experts", "n", "k", "top_k")}
    return Problem.of(entry["dtype"], **shape)


def _is_gate_up(entry: Mapping[str, Any]) -> bool:
    """Whether a shape is the gate-up GEMM of a known model, on some number of ranks."""
    for layer in models().values():
        if (layer.experts, layer.top_k, layer.hidden) == (entry["experts"], entry["top_k"], entry["k"]):
            ranks, rest = divmod(2 * layer.intermediate, entry["n"])
            if rest == 0 and layer.intermediate % ranks == 0:
                return True
    return False
