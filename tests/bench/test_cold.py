"""The kernel that flushes L2 and measures the read ceiling reads every element once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from bench.cold import read
source = torch.randint(-100, 100, (50_001,), dtype=torch.int32)
sums = torch.full((13,), 7, dtype=torch.int32)
read(source, sums, 4096, 1024)
assert int(sums.sum()) == int(source.sum()), (sums, source.sum())
print("read", source.numel())
"""


def test_read_kernel_reads_everything_once() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "read 50001", found.stderr
