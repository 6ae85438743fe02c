"""Lines of the targets table: what a target asks of one backend and dtype, and how far that is met.

A bound is a line too, told beside those of the backends: what a kernel would reach that is as fast as a plain read
(reads.py), or at the floor. Where that is less than the target asks for, the target is denied, and its verdict says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

Bound = Literal[">=", "<="]
PLAIN, FLOOR = "a plain read", "the floor"
"""What bounds have in place of a backend."""
FLOOR_OVER_TIME = "floor / time"
"""How the targets begin that are about a floor."""


@dataclasses.dataclass(frozen=True)
class Value:
    """One case's part of a target. value: None where there is none, and `reason` says why."""

    case: str
    value: float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    """One target for one backend and dtype.

    worst, worst_case: of the measured cases; mean: their geometric mean (of call costs, which may be negative, the
    median); met, of: cases that meet it, and all that it is about; status: "met", "missed", or "told" where there is no
    bound; reason: what was not measured, or what the figure is not; read_worst, read_mean: plain read of the same bytes
    over time (a floor's lines only); denied: why no kernel could meet it, of a line that is missed; left_out: cases
    that it cannot be about; sign: which side of the bound, or of the other lines where there is none, is better
    """

    target: str
    dtype: str
    backend: str
    needed: str
    worst: float | None
    worst_case: str | None
    mean: float | None
    met: int
    of: int
    status: Literal["met", "missed", "told"]
    reason: str = ""
    read_worst: float | None = None
    read_mean: float | None = None
    denied: str = ""
    left_out: str = ""
    sign: Bound = ">="

    @property
    def is_bound(self) -> bool:
        """Whether it is no target of a backend's but what stands beside those."""
        return self.backend in (PLAIN, FLOOR)

    @property
    def name(self) -> str:
        """Such as "floor / time, decode, 50 to 200 MB, fp16, torch-triton"."""
        return ", ".join(part for part in (self.target, self.dtype, self.backend) if part)


def line_of(
    target: str,
    dtype: str,
    backend: str,
    values: Sequence[Value],
    sign: Bound,
    bound: float | None,
    *,
    mean: Callable[[Sequence[float]], float] | None = None,
    unit: str = "",
    judged: bool = True,
) -> Line:
    """The line of these values: met where each is there and within the bound, missed where there is no value at all.

    judged False: only told. bound None with judged: the target is that there are figures.
    """
    known = [(value.value, value.case) for value in values if value.value is not None]
    lacking = [value for value in values if value.value is None]
    pick = min if sign == ">=" else max
    worst, worst_case = pick(known) if known else (None, None)
    average = (mean or geometric)([value for value, _ in known]) if known else None
    inside = len(known) if bound is None else sum(within(value, sign, bound) for value, _ in known)
    reason = lacking_told(lacking)
    status: Literal["met", "missed", "told"] = "met" if values and inside == len(values) else "missed"
    if not values:
        reason = "not measured: it is about no case"
    if not judged or (bound is None and status == "met"):
        status = "told"
    needed = "–" if bound is None else f"{sign} {bound:.3g}{unit}"
    return Line(
        target, dtype, backend, needed, worst, worst_case, average, inside, len(values), status, reason, sign=sign
    )


def deny(line: Line, values: Sequence[Value], most: Sequence[Value], bound: float, told: str) -> Line:
    """The line with what denies it: cases that miss it where `most`, the most that a kernel can reach, misses it too.

    values, most: of the same cases by name, to be `bound` or more; told: such as "a plain read reaches {:.3f}", to be
    given the least of `most`. A line that is met is left as it is.
    """
    lacking = sum(value.value is None for value in values)  # nothing denies those
    short = {value.case for value in values if value.value is not None and value.value < bound}
    known = {value.case: value.value for value in most if value.value is not None}
    under = {case for case in short if case in known and known[case] < bound}
    if line.status != "missed" or not under:
        return line
    text = told.format(min(known[case] for case in under))
    if len(under) < len(values):
        text += f", less than {bound:.3g} in {len(under)} of {len(values)} cases"
        left = len(short) - len(under) + lacking
        text += f"; {left} of the others {'is' if left == 1 else 'are'} missed" if left else "; all others are met"
    return dataclasses.replace(line, denied=f"denied: {text}")


def within(value: float, sign: Bound, bound: float) -> bool:
    return value >= bound if sign == ">=" else value <= bound


def lacking_told(lacking: Sequence[Value]) -> str:
    if not lacking:
        return ""
    others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"not measured: {lacking[0].case}{others} ({lacking[0].reason})"


def geometric(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def table(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Every line, for a terminal."""
    headings = ["target", "dtype", "backend", "needed", "worst", "in", "mean", "plain read / time"]
    headings += ["cases that meet it", "verdict"]
    return headings, [
        [
            line.target,
            line.dtype,
            line.backend,
            line.needed,
            number(line.worst),
            line.worst_case or "–",
            number(line.mean),
            read_over_time(line),
            f"{line.met} of {line.of}",
            verdict(line),
        ]
        for line in lines
    ]


def verdict(line: Line) -> str:
    """ "met", "missed", "not measured: ...", "no target", or "a bound"; then why no kernel could meet it."""
    word: str = "a bound" if line.is_bound else "no target" if line.status == "told" else line.status
    if line.reason:
        word = f"{word}, {line.reason}" if line.worst is not None else line.reason
    return "; ".join(part for part in (word, line.denied, line.left_out) if part)


def read_over_time(line: Line) -> str:
    """Such as "0.931, mean 0.962"; empty for lines that are not about a floor, and for bounds."""
    if line.is_bound or not line.target.startswith(FLOOR_OVER_TIME):
        return ""
    return "not measured" if line.read_mean is None else f"{number(line.read_worst)}, mean {number(line.read_mean)}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
