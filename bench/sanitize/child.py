"""The process that compute-sanitizer watches: runs variants or plants one after the other and says how each ended.

Reads a JSON list of [id, what] pairs from the file that its argument names. Around each it prints the lines
`@@begin ID` and `@@end ID RESULT`, between which the sanitizer's findings about it appear.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PAUSE = 0.1
"""Seconds before the end is said: what the sanitizer found travels through another process to the same output."""


def main() -> None:
    for name, what in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(f"@@begin {name}", flush=True)
        started = time.monotonic()
        try:
            result = _plant(what) if isinstance(what, str) else run(what)
            lost = False
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            result, lost = {"status": "failed", "reason": reason}, _context_lost()
        time.sleep(PAUSE)
        result["seconds"] = round(time.monotonic() - started, 2)
        print(f"@@end {name} {json.dumps(result)}", flush=True)
        if lost:  # what comes next would fail for this one's fault: another process takes it
            sys.exit(3)


def _context_lost() -> bool:
    """Whether the CUDA context is beyond use, as after an access that the hardware refused."""
    try:
        if (jax := sys.modules.get("jax")) is not None:
            jax.device_put(np.zeros(1)).block_until_ready()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _plant(name: str) -> dict[str, Any]:
    from bench.sanitize import planted

    planted.run(name)
    return {"status": "ran"}


def run(variant: dict[str, Any], *, interpret: bool = False) -> dict[str, Any]:
    """{"status": "right", "error"}; "wrong" or "refused" with a "reason". variant: as `matrix.Variant.to_json`."""
    from backends import arrays, registry
    from bench import gathering
    from bench.sanitize.matrix import data_of
    from shared.config import Config
    from shared.problem import Problem
    from shared.reference import error_bound, relative_error

    module = registry.load(variant["backend"])
    if (reason := module.unavailable(interpret=interpret)) is not None:
        return {"status": "refused", "reason": reason}
    config = Config.from_mapping(variant["config"])
    problem = Problem(**variant["problem"])
    if (reason := module.unsupported(problem, config)) is not None:
        return {"status": "refused", "reason": reason}
    host, reference = data_of(problem, np.array(variant["ids"], np.int32))
    native = [
        None if array is None else arrays.to_framework(array, module.FRAMEWORK, on_gpu=not interpret) for array in host
    ]
    options = {"order": variant["order"], "config": config, "interpret": interpret, "fill": variant["fill"]}
    with gathering.forced(variant["gathers"]):
        y = arrays.to_host(module.moe_gemm(*native, problem=problem, **options))
    error, bound = relative_error(y, reference), error_bound(problem, config.rounded_parts(problem.k))
    if not error <= bound:  # NaN, an element left unwritten, is not
        return {"status": "wrong", "reason": f"error {error:.1e} > {bound:.1e}"}
    return {"status": "right", "error": error}


if __name__ == "__main__":
    main()
