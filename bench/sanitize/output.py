"""Reads what compute-sanitizer and the child under it print to one output, and puts findings down to variants."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

from backends import registry

ROOT = Path(__file__).parents[2]
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?$)|(?:RACECHECK SUMMARY: (\d+) hazards? displayed)")
_HEADER = re.compile(
    r"COMPUTE-SANITIZER|LEAK SUMMARY|Target application returned an error|Error: process didn't terminate success"
    r"|.*Use --print-limit option|\(?\d+ errors?, \d+ warnings?\)?|RACECHECK SUMMARY|ERROR SUMMARY"
)
_OF_THE_TOOL = re.compile(r"(?:Internal Sanitizer )?(?:Error|Warning)\b(?!.*Race reported)", re.IGNORECASE)
_PLACE = re.compile(r"(?:^| )at (?:[A-Za-z_$]|0x[0-9a-f]+ in )")
"""What says in which kernel a finding is: `at kernel+0x70 in file:line`, before 2023 `at 0x70 in file:line:kernel`."""


@dataclasses.dataclass
class Finding:
    """what: first line, such as "Invalid __global__ read of size 4 bytes"; detail: the lines below it."""

    what: str
    detail: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return "; ".join((self.what, *self.detail[:3]))


@dataclasses.dataclass
class Output:
    """What one child and the sanitizer over it printed.

    begun, ended: by id, in order; findings: by id, None for those outside of any
    told:         what the sanitizer says of itself (internal errors, warnings)
    summary:      how many it says it found; None where it did not come to its end
    """

    begun: list[str] = dataclasses.field(default_factory=list)
    ended: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    findings: dict[str | None, list[Finding]] = dataclasses.field(default_factory=dict)
    told: list[str] = dataclasses.field(default_factory=list)
    summary: int | None = None


def parse(text: str) -> Output:
    """The output of compute-sanitizer over bench.sanitize_child."""
    output, current, last = Output(), None, None
    for line in text.splitlines():
        if line.startswith("@@begin "):
            current = line.split()[1]
            output.begun.append(current)
        elif line.startswith("@@end "):
            _, name, result = line.split(" ", 2)
            output.ended[name], current = json.loads(result), None
        elif line.startswith("========="):
            body = line.removeprefix("=========").rstrip()
            text_of = body.strip()
            if summary := _SUMMARY.match(text_of):
                output.summary = (output.summary or 0) + int(summary[1] or summary[2])
            if not text_of or _HEADER.match(text_of):
                last = None
            elif body.startswith("     "):
                if last is not None:
                    last.detail.append(text_of)
            elif _OF_THE_TOOL.match(text_of):
                output.told.append(text_of)
                last = None
            else:
                last = Finding(text_of)
                output.findings.setdefault(current, []).append(last)
    return output


@functools.cache
def own_kernels() -> tuple[str, ...]:
    """Names by which our kernels are known in a finding; the rest are the framework's."""
    files = ("triton_prepare.py", "triton_kernel.py")
    triton_source = "".join((ROOT / "backends" / file).read_text(encoding="utf-8") for file in files)
    names = [registry.load(name).KERNEL_NAME for name in registry.BACKENDS]
    return tuple(dict.fromkeys((*names, *re.findall(r"^def (\w+_kernel)\(", triton_source, re.MULTILINE), "planted_")))


def is_ours(finding: Finding) -> bool:
    """Whether a finding is in one of our kernels, or does not say in which kernel it is."""
    named = [line for line in (finding.what, *finding.detail) if _PLACE.search(line)]
    return not named or any(kernel in line for line in named for kernel in own_kernels())
