"""Sums of one sign in fp8-w8a8, where what the FP8 matrix unit cuts off does not average out.

    python -m bench.matrix_unit bench/results/h200/matrix-unit.json     measured anew into a results file (needs a GPU)

Row t of x is row t of w, so every product of y[t, t] is positive.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shared import fp8

DEPTHS = (1024, 2048, 4096, 7168)
TOKENS = 64
CHANNELS = 256


def one_sign(k: int) -> dict[str, np.ndarray]:
    """x (TOKENS, k) bfloat16, w (1, CHANNELS, k) e4m3 and its w_scale (1, CHANNELS); x as the kernel reads it: q, e4m3
    with scales x_scale (TOKENS,)."""
    w, w_scale = fp8.quantise_channel(np.random.default_rng(k).standard_normal((1, CHANNELS, k)).astype(np.float32))
    x = (w.astype(np.float32) * w_scale[..., None])[0, :TOKENS].astype(ml_dtypes.bfloat16)
    q, x_scale = fp8.quantise_token(x)
    return {"x": x, "w": w, "w_scale": w_scale, "q": q, "x_scale": x_scale}


def measure(backend: str, k: int) -> float:
    """Mean of y / exact - 1 over the sums of one sign, on the GPU."""
    import backends

    data = one_sign(k)
    ids = np.zeros((TOKENS, 1), np.int32)
    y = backends.moe_gemm(data["x"], data["w"], ids, w_scale=data["w_scale"], mode="w8a8", backend=backend)
    token = np.arange(TOKENS)
    products = data["q"].astype(np.float64) * data["w"][0, :TOKENS].astype(np.float64)
    exact = products.sum(axis=1) * data["x_scale"] * data["w_scale"][0, :TOKENS]
    return float((np.asarray(y).astype(np.float64)[token, 0, token] / exact - 1).mean())


def sentence(found: dict[str, Any]) -> str:
    """What the measured rows say."""
    rows = found["one_sign"]["rows"]
    losses = {k: [-row["measured"] for row in rows if row["k"] == k] for k in sorted({row["k"] for row in rows})}
    parts = [f"{min(of_k):.1%} at K = {k}" for k, of_k in losses.items()]
    same = all(max(of_k) - min(of_k) < 1e-4 for of_k in losses.values())
    return f"On one {found['gpu']}, {'every backend alike' if same else 'at least'}: too small by {', '.join(parts)}."


def main(path: Path) -> None:
    import torch

    from backends.registry import BACKENDS
    from bench.machine import versions

    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = [{"k": k, "backend": backend, "measured": measure(backend, k)} for k in DEPTHS for backend in BACKENDS]
    what = found.get("one_sign", {}).get("what", __doc__)
    found |= {"gpu": torch.cuda.get_device_name(), "versions": versions(), "one_sign": {"what": what, "rows": rows}}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(sentence(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
