"""`python -m bench predict`: DRAM bytes and time of one launch by the cache model; fits it, and judges it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.terminal import print_table
from shared.checks import ArgumentError

MOST_TOKENS = 65536
MOST_TILES = 200_000
"""What a prediction takes a few seconds for."""
CONVERTED = ("fp8-w8a16", "fp4-w4a16")
"""Weights that are widened in registers are the right operand in every config here; others the left one."""


def predict(
    model: Annotated[str | None, typer.Option(help="a model of shared/data/models.json; or --n and --k")] = None,
    gemm: Annotated[str, typer.Option(help="gate-up or down")] = "gate-up",
    tp: Annotated[int | None, typer.Option(help="tensor-parallel degree; default: as the model is served")] = None,
    n: Annotated[int | None, typer.Option(help="output channels, without a model")] = None,
    k: Annotated[int | None, typer.Option(help="depth, without a model")] = None,
    experts: Annotated[int | None, typer.Option(help="without a model; default: as many as --expert-counts")] = None,
    top_k: Annotated[int | None, typer.Option(help="experts per token, without a model (default 1)")] = None,
    expert_counts: Annotated[str | None, typer.Option(help="slots per expert: 61,70,...; or --tokens")] = None,
    tokens: Annotated[int | None, typer.Option(help="batch size, routed by --routing")] = None,
    routing: Annotated[str, typer.Option(help="uniform, zipf-EXPONENT, one-expert, or a .npy file")] = "uniform",
    seed: Annotated[int, typer.Option(help="of the routing")] = 0,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp8-w8a16, fp8-w8a8, fp4-w4a16 (no kernel here)")] = "fp16",
    order: Annotated[str | None, typer.Option(help="row, column, grouped, popular; default: a table of all")] = None,
    block_m: Annotated[int, typer.Option(help="rows of a tile")] = 16,
    block_n: Annotated[int, typer.Option(help="columns of a tile")] = 128,
    block_k: Annotated[int, typer.Option(help="depth of a K step")] = 128,
    num_warps: Annotated[int, typer.Option(help="warps of a thread block")] = 4,
    num_stages: Annotated[int, typer.Option(help="pipeline stages")] = 4,
    group_m: Annotated[int, typer.Option(help="tile rows per band of grouped")] = 8,
    gpu: Annotated[str, typer.Option(help="of shared/data/gpus.json; the next four override its numbers")] = "h200",
    sms: Annotated[int | None, typer.Option(help="multiprocessors")] = None,
    l2_bytes: Annotated[float | None, typer.Option(help="L2, as the device reports it")] = None,
    dram_bytes_per_s: Annotated[float | None, typer.Option(help="datasheet rate")] = None,
    flops: Annotated[float | None, typer.Option(help="dense matrix operations a second, for the dtype")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="fit the parameters and write them (minutes)")] = False,
    judge: Annotated[bool, typer.Option("--judge", help="set beside counters; exit 1: target missed")] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="predict models on all GPUs, and write it (minutes)")] = False,
    counters: Annotated[Path | None, typer.Option(help="of --fit, --judge; default: the committed ones")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """DRAM bytes and time of one launch of the Triton kernel, simulated: a prediction, which needs no GPU."""
    try:
        if fit + judge + gpus > 1:
            raise ArgumentError("predict: got more than one of --fit, --judge, --gpus; allowed: one")
        if counters is not None and not (fit or judge):
            raise ArgumentError("counters: got a file without --fit or --judge; allowed: with one of them")
        if fit:
            _fit(counters, as_json=as_json)
        elif judge:
            raise typer.Exit(_judge(counters, as_json=as_json))
        elif gpus:
            _gpus(as_json=as_json)
        else:
            ids, shape = _problem(model, gemm, tp, n, k, experts, top_k, expert_counts, tokens, routing, seed)
            config = _config(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_warps=num_warps,
                num_stages=num_stages,
                group_m=group_m,
                swap_ab=dtype not in CONVERTED,
            )
            chip = _chip(gpu, dtype, sms=sms, l2_bytes=l2_bytes, dram_bytes_per_s=dram_bytes_per_s, flops=flops)
            _print(predicted(shape, ids, dtype, order, config, gpu, chip), as_json=as_json)
    except ArgumentError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def predicted(
    shape: tuple[int, int, int], ids: Any, dtype: str, order: str | None, config: Any, gpu: str, chip: Any
) -> dict[str, Any]:
    """One order: its prediction and what it was made from. order None: {"orders": {order: prediction}} beside it."""
    from shared import cache_launch, cache_model
    from shared.checks import check_name

    check_name("dtype", dtype, cache_launch.DTYPES)
    if order is not None:
        check_name("order", order, cache_launch.ORDERS)
    n, k, experts = shape
    found = {}
    for name in cache_launch.ORDERS if order is None else (order,):
        launch = cache_launch.Launch(n=n, k=k, experts=experts, topk_ids=ids, dtype=dtype, order=name, config=config)
        if launch.tiles > MOST_TILES:
            raise ArgumentError(f"tiles: got {launch.tiles} in one launch; allowed: up to {MOST_TILES}")
        found[name] = cache_model.predict(launch, chip).to_mapping()
    about = {
        "kind": "prediction",
        "n": n,
        "k": k,
        "experts": experts,
        "expert_counts": launch.expert_counts.tolist(),
        "dtype": dtype,
        "config": dataclasses.asdict(config),
        "gpu": gpu,
        "chip": dataclasses.asdict(chip),
        "parameters": dataclasses.asdict(cache_model.fitted()),
        "notes": _notes(dtype, gpu, chip),
    }
    if order is not None:
        return {"order": order, **found[order], **about}
    return {"orders": found, "fewest_bytes": min(found, key=lambda name: found[name]["dram_bytes"]), **about}


def _notes(dtype: str, gpu: str, chip: Any) -> list[str]:
    """What the numbers are not backed by."""
    from shared import cache_launch
    from shared.gpus import gpu as known

    notes = []
    if dtype == cache_launch.FP4:
        notes.append("no kernel here has 4-bit weights")
    if gpu != "h200" or chip != cache_launch.Chip.of(known(gpu), dtype):
        notes.append("parameters fitted on an H200; nothing was measured on these numbers")
    return notes


def _problem(
    model: str | None, gemm: str, tp: int | None, n: int | None, k: int | None, experts: int | None,
    top_k: int | None, expert_counts: str | None, tokens: int | None, routing: str, seed: int,
) -> tuple[Any, tuple[int, int, int]]:  # fmt: skip
    """topk_ids and (N, K, experts)."""
    from shared import cache_launch
    from shared import routing as routings
    from shared.models import model as find

    counts = None if expert_counts is None else _counts(expert_counts)
    if model is not None:
        for name, value in (("n", n), ("k", k), ("experts", experts), ("top-k", top_k)):
            if value is not None:
                raise ArgumentError(f"{name}: got {value} with model {model}; allowed: one of them")
        layer = find(model)
        (n, k), experts, top_k = layer.shape(gemm, tp), layer.experts, layer.top_k
    elif n is None or k is None:
        raise ArgumentError("model: got none; allowed: --model NAME, or both --n and --k")
    elif tp is not None:
        raise ArgumentError(f"tp: got {tp} without a model; allowed: with --model, --n and --k are one rank's")
    experts = experts if experts is not None else len(counts) if counts else 1
    top_k = 1 if top_k is None else top_k
    for name, value in (("n", n), ("k", k), ("experts", experts), ("top-k", top_k)):
        if not 1 <= value <= 1 << 20:
            raise ArgumentError(f"{name}: got {value}; allowed: 1 to {1 << 20}")
    if seed < 0:
        raise ArgumentError(f"seed: got {seed}; allowed: 0 or more")
    if (counts is None) == (tokens is None):
        given = "neither" if counts is None else "both"
        raise ArgumentError(f"expert-counts, tokens: got {given}; allowed: one of them")
    if counts is not None:
        if len(counts) != experts:
            raise ArgumentError(f"expert-counts: got {len(counts)} numbers; allowed: {experts}, one per expert")
        if sum(counts) > MOST_TOKENS * top_k:
            raise ArgumentError(f"expert-counts: got {sum(counts)} slots; allowed: up to {MOST_TOKENS * top_k}")
        return cache_launch.deal(counts, top_k, seed=seed), (n, k, experts)
    assert tokens is not None
    if not 1 <= tokens <= MOST_TOKENS:
        raise ArgumentError(f"tokens: got {tokens}; allowed: 1 to {MOST_TOKENS}")
    try:
        return routings.make(routing, tokens, experts, top_k, seed=seed), (n, k, experts)
    except OSError as error:
        raise ArgumentError(f"routing: got {routing!r}, which cannot be read: {error.strerror}") from None


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"expert-counts: got {text!r}; allowed: whole numbers, such as 61,70,0") from None


def _config(**values: Any) -> Any:
    from shared.config import Config

    return Config(**values)


def _chip(gpu: str, dtype: str, **overrides: Any) -> Any:
    from shared.cache_launch import DTYPES, Chip
    from shared.checks import check_name
    from shared.gpus import gpu as known

    check_name("dtype", dtype, DTYPES)
    return dataclasses.replace(
        Chip.of(known(gpu), dtype), **{name: value for name, value in overrides.items() if value is not None}
    )


def _fit(counters: Path | None, *, as_json: bool) -> None:
    from bench import cache_fit

    found = cache_fit.fit(counters or cache_fit.COUNTERS, say=lambda line: typer.echo(line, err=True))
    cache_fit.write(found, cache_fit.PARAMETERS)
    typer.echo(json.dumps(found) if as_json else f"{cache_fit.PARAMETERS}: {found['values']}, errors {found['errors']}")


def _judge(counters: Path | None, *, as_json: bool) -> int:
    from bench import cache_fit, cache_judge, cache_tables

    found = cache_judge.judge(counters or cache_fit.COUNTERS)
    cache_judge.write(cache_judge.JUDGED, found)
    if cache_tables.picture_differs():
        cache_tables.PICTURE.write_text(cache_tables.draw(found), encoding="utf-8")
    misses = cache_judge.missed(found)
    if as_json:
        typer.echo(json.dumps(found | {"missed": misses}))
        return 1 if misses else 0
    print_table(cache_tables.point_lines(found))
    print_table(cache_tables.error_lines(found))
    typer.echo("\n".join(line for line in cache_tables.sentences(found) if line))
    return 1 if misses else 0


def _gpus(*, as_json: bool) -> None:
    from bench import cache_gpus, cache_judge, cache_tables

    found = cache_gpus.other_gpus(say=lambda line: typer.echo(line, err=True))
    cache_judge.write(cache_gpus.OTHER_GPUS, found)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_table(cache_tables.gpu_summary(found["rows"]))


def _print(found: dict[str, Any], *, as_json: bool) -> None:
    from shared.config import Config

    if as_json:
        typer.echo(json.dumps(found))
        return
    rows = found.get("orders") or {found["order"]: found}
    headings = ["order", "DRAM read MB", "÷ needed", "weights MB", "activations MB", "predicted µs", "DRAM alone µs"]
    lines = [
        [
            name,
            f"{row['dram_bytes'] / 1e6:.1f}",
            f"{row['times_needed']:.3f}",
            f"{row['weight_bytes'] / 1e6:.1f}",
            f"{row['x_bytes'] / 1e6:.1f}",
            f"{row['time_us']:.1f}",
            f"{row['dram_us']:.1f}",
        ]
        for name, row in rows.items()
    ]
    first = next(iter(rows.values()))
    typer.echo(
        f"Prediction, {found['gpu']}, {found['dtype']}, N = {found['n']}, K = {found['k']}: "
        f"{first['tile_rows']} tile rows, {first['tiles']} tiles, thread blocks per multiprocessor: "
        f"{first['blocks_per_sm']}; tile {Config.from_mapping(found['config'])}"
    )
    print_table((headings, lines))
    for note in found["notes"]:
        typer.echo(f"Note: {note}.")
