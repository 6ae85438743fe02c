"""Tables of results, as rows of text that the terminal and README share."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from backends import tuning
from backends.registry import BACKENDS
from bench import results
from bench.cases import Row
from shared.checks import ArgumentError
from shared.config import Config

Table = tuple[list[str], list[list[str]]]
"""(headings, rows)"""
TWO_BYTES = ("fp16", "bf16")
DECODE_TOKENS = 64

NOT_MEASURED = "Not measured yet."
"""A generated block that there are no results for."""


def merged(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Compact results of several runs as one; where an id was measured again, the later run counts.

    Raises ValueError where GPU, versions or settings differ: such times do not belong in one table.
    """
    found: dict[str, Any] | None = None
    for run in sorted(runs, key=lambda content: content["run"].get("date", "")):
        if found is None:
            found = run
        elif differing := results.differences(found["run"], run["run"]):
            dates = " and ".join(content["run"].get("date", "no date") for content in (found, run))
            raise ValueError(f"runs of {dates} cannot share a table, as they differ in {'; '.join(differing)}")
        else:
            found = results.combined(found, run)
    return found or {"run": {}, "rows": [], "pairs": [], "published": [], "skipped": {}}


OTHER_SOURCES = "‡"
"""Beside an order effect that was measured with other sources of the kernels than the time it stands beside."""


def kernel_times(found: dict[str, Any]) -> Table:
    """Per case and dtype: floor, kernel time of each backend, best peer, best share of the ceiling, order effect.

    A backend's time is that of the fastest order measured, named where it is not column.
    Peers with 2-byte weights stand beside fp16 and bf16 alike: they move the same bytes.
    """
    timed = [row for row in found["rows"] if row.get("kernel_us")]
    failed = [row for row in found["rows"] if _kernel_failure(row) and row["contender"] in BACKENDS]
    effects = {_key(pair): pair for pair in found["pairs"] if pair["b"] == "row"}
    paired = [name for name in BACKENDS if any(key[2] == name for key in effects)]
    ours = [row for row in timed if row["contender"] in BACKENDS]
    groups = list(dict.fromkeys((row["case"], _dtype(row)) for row in (*ours, *failed)))
    headings = ["case", "dtype", "floor µs", *BACKENDS, "best peer", "floor ÷ best"]
    headings += [f"row ÷ column, {name}" for name in paired]
    lines = []
    for case, dtype in groups:
        own: dict[str, dict[str, Any]] = {}
        for row in ours:
            name = row["contender"]
            if (row["case"], _dtype(row)) == (case, dtype):
                own[name] = min(own.get(name, row), row, key=lambda item: item["kernel_us"])
        amiss = {row["contender"]: row for row in failed if (row["case"], _dtype(row)) == (case, dtype)}
        peers = [
            row
            for row in timed
            if row["case"] == case and row["contender"] not in BACKENDS and _comparable(dtype, _dtype(row))
        ]
        best = min(own.values(), key=lambda row: row["kernel_us"], default=None)
        peer = min(peers, key=lambda row: row["kernel_us"], default=None)
        times = [_cell(own.get(name), amiss.get(name)) for name in BACKENDS]
        winner = best["contender"] if best else None
        lines.append(
            [
                case,
                dtype,
                f"{best['floor_us']:.1f}" if best else "–",
                *(f"**{t}**" if name == winner else t for name, t in zip(BACKENDS, times, strict=True)),
                "–" if peer is None else f"{peer['kernel_us']:.1f} ({peer['contender']})",
                f"{1 / best['times_floor']:.0%}" if best else "–",
                *(_effect(effects.get((case, dtype, name)), own.get(name)) for name in paired),
            ]
        )
    return headings, lines


def notes(found: dict[str, Any]) -> list[str]:
    """What a table cannot show: measurements that failed or were wrong, and what made times doubtful (marked †)."""
    pairs = {(pair["id"].replace(f"/{pair['b']}-vs-column/", "/column/"), pair["b"]) for pair in found["pairs"]}
    lines = []
    for row in found["rows"]:
        for test, reason in row.get("failures", {}).items():
            if (row["id"], test.removeprefix("pair with ")) not in pairs:
                lines.append(f"{row['id']} {test}: {reason}")
    doubtful: dict[str, list[str]] = {}
    for item in (*found["rows"], *found["pairs"]):
        for notice in item.get("notices", ()):
            doubtful.setdefault(notice, []).append(item["id"])
    for notice, ids in doubtful.items():
        others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        lines.append(f"† {notice} ({ids[0]}{others})")
    return [*lines, *found.get("notices", ())]


def other_tiles(found: dict[str, Any]) -> list[str]:
    """A sentence where calls take other configs today than the backends' rows were measured with; [] where none do."""
    changed: Counter[str] = Counter()
    for row in found["rows"]:
        if row["contender"] in BACKENDS and (config := results.config_of(row)) is not None:
            changed[row["contender"]] += config != (_config_today(row) or config)
    told = ", ".join(f"{count} of {name}" for name, count in changed.items() if count)
    return [f"calls take other tiles today than these rows were measured with: {told}"] if told else []


def _config_today(row: dict[str, Any]) -> Config | None:
    """What a call takes for a row of a backend; None for a layer that is not known, or is another one by now."""
    try:
        model, gemm, _, tokens, *rest = row["id"].split("/")
        asked = Row.of(model, gemm, int(tokens.removeprefix("tokens-")), *rest)
        if asked.case.name != row["case"]:
            return None
        return tuning.choose(asked.problem, row["contender"], row.get("gpu")).config
    except (ArgumentError, TypeError, ValueError):
        return None


def skipped(found: dict[str, Any]) -> list[str]:
    """What was not measured, one line a reason: a peer that is not installed has the same one in every case."""
    rows: dict[str, list[str]] = {}
    for name, reason in found["skipped"].items():
        rows.setdefault(reason, []).append(name)
    return [
        f"not measured: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in rows.items()
    ]


def peers_told(found: dict[str, Any]) -> list[str]:
    """Version and config of each peer's row that tells them."""
    rows = (row for row in found["rows"] if row["contender"] not in BACKENDS and row.get("about"))
    return [f"{row['id']}: {row['about']}" for row in rows]


def configs(found: dict[str, Any]) -> Table:
    """The config in force of each row of a backend, and where it is from (measured, nearest, rule of thumb)."""
    lines = []
    for row in found["rows"]:
        if row["contender"] in BACKENDS and (config := results.config_of(row)) is not None:
            lines.append([row["id"], str(config), row.get("about", "–")])
    return ["row", "config", "from"], lines


def compared(files: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, Table]:
    """(what the files differ in, kernel times side by side by id): nothing is merged, and what differs is told.

    A ratio is that of the file over the first; rows of another config or source say so.
    """
    first_name, first = files[0]
    told = []
    for name, found in files[1:]:
        differing = results.differences(first["run"], found["run"], results.RESUMED)
        what = "; ".join(differing) if differing else "nothing: GPU, versions, settings and sources agree"
        told.append(f"{name} differs from {first_name} in {what}")
    times = [{row["id"]: row for row in found["rows"] if row.get("kernel_us")} for _, found in files]
    headings = ["row", f"{first_name} µs"]
    for name, _ in files[1:]:
        headings += [f"{name} µs", "÷ first"]
    lines = []
    for row_id in dict.fromkeys(key for part in times for key in part):
        base = times[0].get(row_id)
        line = [row_id, _time(base and base["kernel_us"])]
        for part in times[1:]:
            row = part.get(row_id)
            line += [_time(row and row["kernel_us"]), "–"]
            if row and base:
                line[-1] = f"{row['kernel_us'] / base['kernel_us']:.3f}{_other_kernel(base, row)}"
        lines.append(line)
    return "\n".join(told), (headings, lines)


def _other_kernel(a: dict[str, Any], b: dict[str, Any]) -> str:
    one, other = results.config_of(a), results.config_of(b)
    if one != other:
        return f" (config {one} → {other})"
    return " (other sources)" if results.of_another_kernel(a, b) else ""


def _cell(row: dict[str, Any] | None, amiss: dict[str, Any] | None) -> str:
    if row is not None:
        return _backend_time(row)
    return "–" if amiss is None else _kernel_failure(amiss)


def _kernel_failure(row: dict[str, Any]) -> str:
    """Such as "wrong: error 3.1e-02 > 4.2e-04" of a row without a kernel time; empty where nothing failed."""
    failures = row.get("failures", {})
    if row.get("kernel_us") or not failures:
        return ""
    reason = failures.get("kernel") or next(iter(failures.values()))
    return reason if len(reason) <= 60 else reason[:57] + "..."


SHORT = (
    "mixtral-8x7b/gate-up/tp2/tokens-8",
    "mixtral-8x7b/gate-up/tp2/tokens-512",
    "qwen3-30b-a3b/gate-up/tp1/tokens-64",
    "qwen3-30b-a3b/gate-up/tp1/tokens-512",
    "deepseek-v3/gate-up/tp8/tokens-64",
    "gpt-oss-120b/gate-up/tp1/tokens-8",
)
"""README's cases: decode and more tokens, few large experts and many small ones, sizes no multiple of a tile."""


def short(found: dict[str, Any]) -> dict[str, Any]:
    """The results of README's cases alone."""
    return found | {part: [item for item in found[part] if item["case"] in SHORT] for part in ("rows", "pairs")}


def call_times(found: dict[str, Any]) -> Table:
    """Where captured calls were measured: GPU total of a call, and what a caller waits for, eager and captured, µs."""
    headings = ["case", "dtype", "contender", "kernel", "GPU total", "call, eager", "call, captured"]
    keys = ("kernel_us", "gpu_total_us", "call_us", "call_captured_us")
    lines = [
        [row["case"], _dtype(row), row["contender"], *(_time(row.get(key)) for key in keys)]
        for row in found["rows"]
        if row.get("call_captured_us") and row["order"] in ("column", "own")
    ]
    return headings, lines


def gpu_totals(found: dict[str, Any]) -> Table:
    """GPU time of all kernels of an eager call, µs: each backend's fastest order, the least of a line in bold."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"]:
        if row["contender"] in BACKENDS and row.get("gpu_total_us"):
            own = times.setdefault((row["case"], _dtype(row)), {})
            own[row["contender"]] = min(own.get(row["contender"], math.inf), row["gpu_total_us"])
    lines = []
    for (case, dtype), own in times.items():
        least = min(own.values())
        cells = [_time(own.get(name)) for name in BACKENDS]
        bold = (f"**{cell}**" if own.get(name) == least else cell for name, cell in zip(BACKENDS, cells, strict=True))
        lines.append([case, dtype, *bold])
    return ["case", "dtype", *BACKENDS], lines


def published(found: dict[str, Any]) -> Table:
    """The kernel as published in 2024: what it writes, and the time of writing everything."""
    headings = ["tokens", "tiles visited (counted)", "output written", "its µs", "row order µs", "apparent speed-up"]
    lines = [
        [
            str(item["tokens"]),
            f"{item['coverage']:.2%}",
            f"{item['written']:.2%}",
            f"{item['published_us']:.1f}",
            f"{item['row_us']:.1f}",
            f"{item['row_us'] / item['published_us']:.1f}×",
        ]
        for item in sorted(found["published"], key=lambda item: item["tokens"])
    ]
    return headings, lines


def findings(found: dict[str, Any]) -> str:
    """The answer in a few sentences, every figure computed from the results. Decode: 64 tokens and fewer."""
    return _listed([*(_order_finding(found, name) for name in BACKENDS), *_framework_findings(found)])


def framework_findings(found: dict[str, Any]) -> str:
    """Those of `findings` that say nothing of tile order."""
    return _listed(_framework_findings(found))


def _framework_findings(found: dict[str, Any]) -> list[str]:
    return [_framework_finding(found), _fp8_finding(found), _accuracy_finding(found), _peer_finding(found)]


def _listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines if line) or "No results yet."


def _order_finding(found: dict[str, Any], contender: str) -> str:
    """Row against column order in one backend, at the tile that is best for column order."""
    pairs = [pair for pair in found["pairs"] if pair["b"] == "row" and pair["contender"] == contender]
    if not pairs:
        return ""
    decode = [pair for pair in pairs if _tokens(pair["case"]) <= DECODE_TOKENS]
    larger = [pair for pair in pairs if _tokens(pair["case"]) > DECODE_TOKENS]
    gpu = found["run"]["gpu"]
    counts = [sum(1 for pair in pairs if test(pair)) for test in (_row_wins, _column_wins)]
    parts = [
        f"**Order, {contender}**, on one {gpu}, at tiles tuned in one order: of {len(pairs)} cases and dtypes row "
        f"order is faster in {counts[0]}, column order in {counts[1]}, no difference in {len(pairs) - sum(counts)}. "
        "Row order takes "
    ]
    if decode:
        parts.append(f"{_span(decode)} of column order's time up to {DECODE_TOKENS} tokens ({len(decode)} cases)")
    if larger:
        tokens = " and ".join(sorted({str(_tokens(pair["case"])) for pair in larger}, key=int))
        parts.append(f"{', and ' if decode else ''}{_span(larger)} at {tokens} tokens ({len(larger)} cases)")
    fp8 = [pair for pair in pairs if pair["dtype"].startswith("fp8")]
    two = [pair for pair in pairs if pair["dtype"] in TWO_BYTES]
    if fp8 and two:
        parts.append(f". Largest difference with 16-bit weights {_largest(two)}, with FP8 weights {_largest(fp8)}")
    return "".join(parts) + "."


def _row_wins(pair: dict[str, Any]) -> bool:
    return pair["verdict"] != "no difference" and pair["ratio"] < 1


def _column_wins(pair: dict[str, Any]) -> bool:
    return pair["verdict"] != "no difference" and pair["ratio"] > 1


def _framework_finding(found: dict[str, Any]) -> str:
    """Backends within 1 % of a case's best, by the GEMM kernel alone and by all that a call runs on the GPU."""
    parts = []
    for key, name in (("kernel_us", "GEMM kernel alone"), ("gpu_total_us", "GPU time of the whole call")):
        full = _best_by_backend(found, key)
        if not full:
            return ""
        near = {b: sum(times[b] <= 1.01 * min(times.values()) for times in full) for b in BACKENDS}
        spread = [max(times.values()) / min(times.values()) for times in full]
        counts = ", ".join(f"{backend} {near[backend]}" for backend in BACKENDS)
        parts.append(
            f"by the {name}, within 1 % of the best in: {counts} (slowest over fastest: median "
            f"{statistics.median(spread):.2f}, at most {max(spread):.2f})"
        )
    sorts = "Above 8 tokens pallas-mosaic sorts rows of x before its kernel where a sorted copy of them is small"
    return f"**Framework**, {len(full)} cases and dtypes: {'; '.join(parts)}. {sorts}."


def _best_by_backend(found: dict[str, Any], key: str) -> list[dict[str, float]]:
    """{backend: least time over its measured orders} of each case and dtype that every backend was measured in."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"]:
        if row.get(key) and row["contender"] in BACKENDS:
            times = groups.setdefault((row["case"], _dtype(row)), {})
            times[row["contender"]] = min(times.get(row["contender"], float("inf")), row[key])
    return [times for times in groups.values() if len(times) == len(BACKENDS)]


def _accuracy_finding(found: dict[str, Any]) -> str:
    """Errors of the backends against float64 on the same weights, and against the weights before quantisation."""
    parts = []
    for dtype in ("fp16", "fp8-w8a16", "fp8-w8a8"):
        rows = [row for row in found["rows"] if row["dtype"] == dtype and row["contender"] in BACKENDS]
        errors = [row["error"] for row in rows if row.get("error")]
        if errors:
            lost = [row["quantisation_error"] for row in rows if row.get("quantisation_error")]
            paid = f" (quantisation itself {min(lost):.1%} to {max(lost):.1%})" if lost else ""
            parts.append(f"{dtype} {min(errors):.1e} to {max(errors):.1e}{paid}")
    return f"**Accuracy**, relative error against float64: {'; '.join(parts)}." if parts else ""


def _fp8_finding(found: dict[str, Any]) -> str:
    """Best 16-bit kernel over best FP8 kernel of a case, decode, 200 MB and more to read in 16 bits."""
    best: dict[tuple[str, bool], float] = {}
    read: dict[str, float] = {}
    for row in found["rows"]:
        if row.get("kernel_us") and row["contender"] in BACKENDS and _tokens(row["case"]) <= DECODE_TOKENS:
            key = (row["case"], row["dtype"].startswith("fp8"))
            best[key] = min(best.get(key, float("inf")), row["kernel_us"])
            if not key[1]:
                read[row["case"]] = row["read_bytes"]
    gains = [best[case, False] / best[case, True] for case in read if (case, True) in best and read[case] >= 200e6]
    if not gains:
        return ""
    return (
        f"**FP8**: up to {DECODE_TOKENS} tokens, reading 200 MB and more, the best FP8 kernel is {min(gains):.2f} to "
        f"{max(gains):.2f} times as fast as the best 16-bit kernel ({len(gains)} cases of this set)."
    )


def _peer_finding(found: dict[str, Any]) -> str:
    """Fastest peer over fastest backend, per case and dtype."""
    _, lines = kernel_times(found)
    ratios = []
    for line in lines:
        cells = [text.strip("*").split()[0] for text in line[3 : 3 + len(BACKENDS)]]
        times = [float(text) for text in cells if text[0].isdigit()]  # the others: not measured, failed, wrong
        peer = line[3 + len(BACKENDS)]
        if times and peer != "–":
            ratios.append(float(peer.split()[0]) / min(times))
    if not ratios:
        return ""
    return (
        f"**Peers**: the fastest one takes {min(ratios):.2f} to {max(ratios):.2f} times the time of the best backend "
        f"(median {statistics.median(ratios):.2f})."
    )


def _tokens(case: str) -> int:
    return int(case.rsplit("tokens-", 1)[1])


def _span(pairs: list[dict[str, Any]]) -> str:
    ratios = [pair["ratio"] for pair in pairs]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _largest(pairs: list[dict[str, Any]]) -> str:
    pair = max(pairs, key=lambda item: abs(math.log(item["ratio"])))
    return f"{pair['ratio']:.2f} [{pair['low']:.2f}, {pair['high']:.2f}] ({pair['case']}, {pair['dtype']})"


def markdown(table: Table) -> str:
    headings, lines = table
    if not lines:
        return "No results yet."
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def environment(run: dict[str, Any]) -> str:
    """One paragraph: where, when, with what, against which ceilings; of each run, where there are several."""
    runs, versions = results.history(run), run["versions"]

    def each(values: Iterable[str]) -> str:
        return " and ".join(dict.fromkeys(values))

    def ceiling(name: str, unit: float, form: str) -> str:
        found = sorted(one["ceilings"][name] / unit for one in runs if name in one["ceilings"])
        return " to ".join(dict.fromkeys(format(value, form) for value in (*found[:1], *found[-1:])))

    fp8 = ceiling("fp8_flops", 1e12, ".0f")
    where = "run" if len(runs) == 1 else "runs"
    installed = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "jax", "jax-triton"))
    return (
        f"{run['gpu']}, {each(one['date'][:10] for one in runs)}, {run['cache']} L2, GPU clock {run['clock']}, "
        f"median of {each(str(one['rounds']) for one in runs)}; {installed}. Measured in the same {where}: "
        f"read ceiling {ceiling('read_bytes_per_s', 1e12, '.2f')} TB/s, "
        f"8192³ products: bf16 {ceiling('bf16_flops', 1e12, '.0f')}{f', FP8 {fp8}' if fp8 else ''} TFLOP/s."
    )


def _dtype(row: dict[str, Any]) -> str:
    return row["dtype"] + (".block" if row["scale_layout"] == "block" else "")


def _comparable(dtype: str, peer_dtype: str) -> bool:
    return dtype == peer_dtype or (dtype in TWO_BYTES and peer_dtype in TWO_BYTES)


def _tile(item: dict[str, Any]) -> Config | None:
    """A row's or a pair's config, whichever of its fields were known when it was measured; None of a peer."""
    return Config.from_mapping(item["config"]) if item.get("config") else None


def _key(item: dict[str, Any]) -> tuple[str, str, str]:
    """Case, dtype and contender of a row or a pair."""
    return item["case"], _dtype(item), item["contender"]


def _effect(pair: dict[str, Any] | None, row: dict[str, Any] | None) -> str:
    """A pair's ratio; none where it is of another tile than the time beside it, marked where of other sources."""
    if pair is None or (row is not None and _tile(pair) != _tile(row)):
        return "–"
    mark = f" {OTHER_SOURCES}" if row is not None and pair.get("sources") != row.get("sources") else ""
    if pair["verdict"] == "no difference":
        return f"no difference{mark}"
    return f"{pair['ratio']:.3f} [{pair['low']:.3f}, {pair['high']:.3f}]{mark}"


def _backend_time(row: dict[str, Any]) -> str:
    order = "" if row["order"] == "column" else f" ({row['order']})"
    return f"{row['kernel_us']:.1f}{order}{' †' if row.get('notices') else ''}"


def _time(microseconds: float | None) -> str:
    return "–" if microseconds is None else f"{microseconds:.1f}"
