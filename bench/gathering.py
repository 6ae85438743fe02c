"""Small problems as if L2 kept nothing of x, so that pallas-mosaic gathers their rows: for tests, fuzzing, sanitizing.

Where it gathers by itself (`backends.mosaic_config.gathers`), x is too large for an interpreter and for what watches
each access of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def forced(on: bool = True) -> Iterator[None]:
    """What is traced within gathers, if `on`; what was traced before is traced anew, within and afterwards."""
    if not on:
        yield
        return
    from backends import mosaic_config, pallas_mosaic

    kept = mosaic_config.KEPT_IN_L2
    mosaic_config.KEPT_IN_L2 = -1
    pallas_mosaic._moe_gemm.clear_cache()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        mosaic_config.KEPT_IN_L2 = kept
        pallas_mosaic._moe_gemm.clear_cache()  # type: ignore[attr-defined]
