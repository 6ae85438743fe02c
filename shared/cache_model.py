"""The cache model: DRAM bytes and time of one launch of the Triton MoE GEMM kernel, simulated. Needs no GPU.

The launch is played through in chunks of K. Thread blocks start in the order of their program ids, as many as fit on
the GPU; each streams its rows of x and its weights chunk by chunk, and the next block takes a finished one's place.

    L2      A chunk that was touched before is still there with probability 1 / (1 + (d / C)**p): d the bytes of
            different lines touched since, C = l2_share * L2, p = l2_sharpness. With p -> infinity that is LRU; a
            smaller p spreads the edge, as sets and hashing do. What one block reads while others wait for it is read
            once. Written y takes its place in L2, too.
            L2 has two halves, each at one half of the multiprocessors. Half of what a block reads has its home in the
            other half, and takes a second place in the half that it is read from. So what blocks of one half read
            takes 1.5 times its size, and what both read takes twice its size.
            One queue delivers l2_bytes_per_sm_per_s from each multiprocessor's share of it. A missed byte costs
            L2_CROSSING more, as it comes from the other half of L2 half of the time; weights that the block with the
            preceding program id reads at the same time cost L2_COALESCED of theirs.
    DRAM    One queue that delivers dram_share of the datasheet's rate, to reads and to writes of y.
    block   A chunk takes (bytes / sm_bytes_per_s + operations / (flops_share * peak) + weights / rate of widening) over
            the block's share of its multiprocessor, or until it has come from DRAM. A tile costs tile_start_s on top.
            Of c blocks on a multiprocessor the oldest gets (1 + older_first) / c of it, the youngest
            (1 - older_first) / c, as warps are scheduled: where the multiprocessor is what they wait for, its blocks
            do not end together, and so leave lockstep. Multiprocessors are slower or faster by up to sm_spread,
            seeded.

Blocks that start together stay together, so tile rows in flight at once share one weight stream, and a block that
hits catches up with the one that misses ahead of it, if DRAM is what that one waits for. Both follow from the queues;
nothing else in here says so.

The parameters are fitted on counters of an H200 (`python -m bench predict --fit`, data/cache_model.json); other GPUs
get the same ones with their datasheets' numbers, which nobody has measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import numpy as np

from shared import orders, planning
from shared.cache_launch import Chip, Launch, blocks_per_sm
from shared.problem import ceil_div

LATENCY_S = 0.8e-6
"""From asking for a K step to having it, under load: what a block's pipeline stages have to cover. Not fitted."""
CLOCK_HZ, SHARED_BYTES_PER_CLOCK = 1.8e9, 128
"""A multiprocessor's clock, and what its shared memory reads or writes in one (CUDA programming guide). Not fitted."""
L2_CROSSING, L2_COALESCED = 0.5, 0.62
"""L2 traffic beyond what is asked for, and what neighbours save: read off counted sectors of the fitted launches."""
MOST_CHUNKS, FEWEST_CHUNKS, CHUNK_READS = 16, 8, 60_000
"""K is cut into so many chunks that all tiles together read about CHUNK_READS, within the two bounds."""
SAMPLED_ROWS = 4
"""Rows of x per tile row that are followed, as L2 sees them; each stands for as many as were left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """What is fitted; the module's docstring says what each does. Rates and seconds are per multiprocessor and tile."""

    l2_share: float
    l2_sharpness: float
    sm_spread: float
    older_first: float
    l2_bytes_per_sm_per_s: float
    dram_share: float
    sm_bytes_per_s: float
    flops_share: float
    widened_per_clock: float
    tile_start_s: float

    def replace(self, **changes: float) -> Parameters:
        return dataclasses.replace(self, **changes)


@functools.cache
def fitted() -> Parameters:
    """The committed parameters."""
    return Parameters(**json.loads(resources.files("shared").joinpath("data/cache_model.json").read_text())["values"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """dram_bytes = weight_bytes + x_bytes + other_bytes (scales and routing, once each); needed_bytes: the least."""

    dram_bytes: float
    time_us: float
    needed_bytes: float
    weight_bytes: float
    x_bytes: float
    other_bytes: float
    written_bytes: float
    dram_us: float
    blocks_per_sm: int
    tile_rows: int
    tiles: int

    @property
    def times_needed(self) -> float:
        return self.dram_bytes / self.needed_bytes

    def to_mapping(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "times_needed": self.times_needed}


def predict(launch: Launch, chip: Chip, parameters: Parameters | None = None, *, seed: int = 0) -> Prediction:
    """Play the launch through once; the same arguments give the same numbers.

    Raises ArgumentError where the config does not fit on a multiprocessor.
    """
    p = fitted() if parameters is None else parameters
    config, block_m, block_n = launch.config, launch.config.block_m, launch.config.block_n
    resident = blocks_per_sm(launch, chip)
    rng = np.random.default_rng(seed)

    # Tiles in the order of their program ids
    popularity = launch.expert_counts if launch.order == "popular" else None
    plan = planning.plan(launch.topk_ids, launch.experts, block_m, popularity)
    tile_rows = int(np.sum(plan.tile_expert >= 0))  # rows of -1 slots read nothing
    expert = plan.tile_expert[:tile_rows]
    tile_cols = ceil_div(launch.n, block_n)
    expert_rows = None
    if launch.order == "popular":
        expert_rows = [rows for _, rows in dict.fromkeys(map(tuple, plan.tile_span[:tile_rows].tolist()))]
    tiles = np.array(list(orders.walk(launch.order, tile_rows, tile_cols, config.group_m, expert_rows)))
    row, col = tiles[:, 0], tiles[:, 1]
    chunks = min(MOST_CHUNKS, max(FEWEST_CHUNKS, CHUNK_READS // len(tiles)))
    depth = launch.k / chunks

    # What can be in L2: each expert's and tile column's weights, and followed rows of x, chunk by chunk
    active, number = np.unique(expert, return_inverse=True)
    weight_keys = len(active) * tile_cols * chunks
    followed, tokens, stands_for = _followed_rows(launch.topk_ids, plan.sorted_slot, tile_rows, block_m, rng)
    width = np.minimum(block_n, launch.n - np.arange(tile_cols) * block_n)
    size = np.concatenate(
        [
            np.tile(np.repeat(width * depth * launch.w_bytes, chunks), len(active)),
            np.full(tokens * chunks, stands_for * depth * launch.x_bytes),
            np.zeros(chunks),  # the row that fills up `followed`
        ]
    )
    first_key = np.concatenate(
        [(number[row] * tile_cols + col)[:, None] * chunks, weight_keys + followed[row] * chunks], axis=1
    )
    keys_per_tile = first_key.shape[1]
    as_before = np.append(False, first_key[1:, 0] == first_key[:-1, 0])
    slots_in_row = (plan.sorted_slot[: tile_rows * block_m].reshape(tile_rows, block_m) < launch.topk_ids.size).sum(1)
    written = (slots_in_row[row] * width[col] * 2).astype(float)

    # Time of a chunk for a block that has a multiprocessor to itself, and the least that its pipeline allows
    chunk_bytes = depth * (block_n * launch.w_bytes + block_m * launch.x_bytes)
    alone = chunk_bytes / p.sm_bytes_per_s
    alone += 2 * block_m * block_n * depth / (p.flops_share * chip.flops / chip.sms)
    if launch.converts:
        alone += block_n * depth / (p.widened_per_clock * CLOCK_HZ)
        if block_m >= 64:
            # wgmma reads them in shared memory: written there and read once more, at 16 bits
            alone += block_n * depth * 4 / (SHARED_BYTES_PER_CLOCK * CLOCK_HZ)
    step_bytes = config.block_k * (block_n * launch.w_bytes + block_m * launch.x_bytes)
    least = chunk_bytes * LATENCY_S / (max(1, config.num_stages - 1) * step_bytes)
    rate = p.dram_share * chip.dram_bytes_per_s
    l2_rate = p.l2_bytes_per_sm_per_s * chip.sms

    running = min(chip.sms * resident, len(tiles))
    chunk_time = max(least, alone * ceil_div(running, chip.sms))
    batch = max(chunk_time, running * chunk_bytes / rate / 2)
    slower = 1 + p.sm_spread * rng.uniform(-1, 1, chip.sms)
    half = rng.permutation(chip.sms) % 2  # which multiprocessors are at which half of L2 is not known: drawn

    sm = np.arange(running) % chip.sms
    tile, chunk, ready = np.arange(running), np.zeros(running, np.int64), np.zeros(running)
    share = _shares_of_sm(tile, chip.sms, p.older_first)
    last, arrival, reader = np.full(len(size), -1), np.zeros(len(size)), np.zeros(len(size), np.int64)
    # Second places: key + (half that it was read from) * keys
    copy_last, copy_reader = np.full(2 * len(size), -1), np.zeros(2 * len(size), np.int64)
    backwards = np.arange(running * keys_per_tile)[::-1].copy()
    touched_in = np.zeros(1024)  # bytes whose last touch was in that step
    touched = weights_read = x_read = end = queue = l2_queue = 0.0
    next_tile, live, step = running, running, 0

    while live:
        # All blocks that become ready about now, in the order in which they do
        now = ready.min()
        chosen = np.flatnonzero(ready <= now + batch)
        chosen = chosen[np.argsort(ready[chosen], kind="stable")]
        mine, start, count = tile[chosen], ready[chosen], len(chosen)
        keys = (first_key[mine] + chunk[chosen][:, None]).ravel()

        # Who is first to read a key misses for all; what it finds in L2 is in expectation
        numbers = backwards[-keys.size :]
        reader[keys[::-1]] = numbers
        first = reader[keys] == numbers[::-1]
        read, before = keys[first], last[keys[first]]
        missed = size[read].copy()
        seen = before >= 0
        since = touched - np.cumsum(touched_in[: step + 1])[before[seen]]
        with np.errstate(over="ignore", invalid="ignore"):
            odds = (since / (p.l2_share * chip.l2_bytes)) ** p.l2_sharpness
            missed[seen] *= np.where(np.isinf(odds), 1.0, odds / (1 + odds))
        copies = keys + np.repeat(half[sm[chosen]], keys_per_tile) * len(size)
        copy_reader[copies[::-1]] = numbers
        copies = copies[copy_reader[copies] == numbers[::-1]]
        takes = np.concatenate([size[read], size[copies % len(size)] / 2])
        before = np.concatenate([before, copy_last[copies]])
        seen = before >= 0
        touched_in[: step + 1] -= np.bincount(before[seen], weights=takes[seen], minlength=step + 1)
        touched_in[step] += takes.sum()
        touched += takes[~seen].sum()
        last[read] = copy_last[copies] = step
        misses = np.zeros((count, keys_per_tile))
        misses.ravel()[first] = missed
        weights_read += misses[:, 0].sum()
        x_read += misses[:, 1:].sum()

        # DRAM serves them one after the other; others that want the same weights wait for the same arrival
        queued = np.cumsum(misses.sum(axis=1)) / rate
        queue = max(queue, now)
        served = np.where(misses.any(axis=1), queue + queued, 0.0)
        queue += queued[-1]
        weight_key = keys[::keys_per_tile]
        fetched = misses[:, 0] > 0.02 * size[weight_key]
        arrival[weight_key[fetched]] = served[fetched]
        asked = size[keys].reshape(count, keys_per_tile)
        asked[as_before[mine] & ~first[::keys_per_tile], 0] *= L2_COALESCED
        passed = np.cumsum((asked + L2_CROSSING * misses).sum(axis=1)) / l2_rate
        l2_queue = max(l2_queue, now)
        served = np.maximum(served, l2_queue + passed)
        l2_queue += passed[-1]
        computed = start + np.maximum(least, alone / share[chosen]) * slower[sm[chosen]]
        ready[chosen] = np.maximum(np.maximum(computed, served), arrival[weight_key])
        chunk[chosen] += 1

        # Finished tiles make room for the next
        finished = chosen[chunk[chosen] == chunks]
        if finished.size:
            finished = finished[np.argsort(ready[finished], kind="stable")]
            out = written[tile[finished]].sum()
            queue += out / rate
            touched_in[step] += out
            touched += out
            end = max(end, ready[finished[-1]])
            follow = finished[: len(tiles) - next_tile]
            tile[follow] = next_tile + np.arange(len(follow))
            chunk[follow] = 0
            ready[follow] += p.tile_start_s
            next_tile += len(follow)
            ready[finished[len(follow) :]] = np.inf
            tile[finished[len(follow) :]] = -1
            share = _shares_of_sm(tile, chip.sms, p.older_first)
            live -= len(finished) - len(follow)
        step += 1
        if step == len(touched_in):
            touched_in = np.concatenate([touched_in, np.zeros(step)])

    read_once = tokens * stands_for * launch.k * launch.x_bytes
    read_once += sum(width) * launch.k * launch.w_bytes * len(active)
    other = launch.needed_bytes - read_once
    return Prediction(
        dram_bytes=float(weights_read + x_read + other),
        time_us=float(end + 2 * p.tile_start_s) * 1e6,
        needed_bytes=float(launch.needed_bytes),
        weight_bytes=float(weights_read),
        x_bytes=float(x_read),
        other_bytes=float(other),
        written_bytes=float(written.sum()),
        dram_us=float(weights_read + x_read + other + written.sum()) / rate * 1e6,
        blocks_per_sm=resident,
        tile_rows=tile_rows,
        tiles=len(tiles),
    )


def _shares_of_sm(tile: np.ndarray, sms: int, older_first: float) -> np.ndarray:
    """Each block's share of its multiprocessor, (running,): tile (running,) in places 0, 1, ..., -1 where none is left.

    Place i is on multiprocessor i % sms. The one with the least tile number is the oldest.
    """
    lanes = ceil_div(len(tile), sms)
    if lanes == 1:
        return np.ones(len(tile))
    gone = np.iinfo(np.int64).max
    on_sm = np.full((lanes, sms), gone)
    on_sm.ravel()[: len(tile)] = np.where(tile >= 0, tile, gone)
    count = np.maximum(1, (on_sm != gone).sum(axis=0))
    age = (on_sm < on_sm[:, None]).sum(axis=1)  # 0: the oldest
    share = (1 + older_first * (1 - 2 * age / np.maximum(1, count - 1)) * (count > 1)) / count
    return share.ravel()[: len(tile)]


def _followed_rows(
    topk_ids: np.ndarray, sorted_slot: np.ndarray, tile_rows: int, block_m: int, rng: np.random.Generator
) -> tuple[np.ndarray, int, float]:
    """(rows of x followed by each tile row, (R, width), filled up with their number), their number, tokens per row.

    Tokens without an expert are read by nobody; they are spread over the others, as `Problem.read_bytes` counts them.
    """
    tokens, top_k = topk_ids.shape
    used = np.flatnonzero((topk_ids >= 0).any(axis=1))
    slot = sorted_slot[: tile_rows * block_m].reshape(tile_rows, block_m)
    valid = slot < topk_ids.size
    count = max(1, len(used) // max(1, int(valid.sum() / tile_rows / SAMPLED_ROWS)))
    name = np.full(tokens + 1, count)
    name[rng.permutation(used)[:count]] = np.arange(count)
    rows = np.sort(name[np.where(valid, slot // top_k, tokens)], axis=1)
    width = max(1, int((rows < count).sum(axis=1).max()))
    return rows[:, :width], count, tokens / count
