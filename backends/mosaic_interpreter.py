"""Threads for Mosaic's interpreter.

It runs each warp-group as a thread that waits in a callback, and those callbacks take threads of JAX's CPU client,
which has one for each core. With two, all of them may wait for a warp-group that gets none, for ever. The client asks
the environment how many to have, NPROC, when JAX is first used in a process.
"""

from __future__ import annotations

import os
import sys

FEWEST = 4
"""Threads with which no call was seen to hang, as half of some calls did with two."""
ENOUGH = 16
"""A thread for each warp-group of three thread blocks, and some."""


def prepare() -> None:
    """Have the client that is to come get threads enough, if the environment does not say how many. Imports no JAX."""
    bridge = sys.modules.get("jax._src.xla_bridge")  # which alone tells; not there before jax is imported
    used = bridge is not None and bridge.backends_are_initialized()
    if _cores() < ENOUGH and not used:
        os.environ.setdefault("NPROC", str(ENOUGH))


def too_few() -> str | None:
    """Why calls may hang here, and what to do about it; None where the client has, or will have, threads enough."""
    if _threads >= FEWEST:
        return None
    return (
        f"its interpreter may hang, as JAX was first used with {_threads} threads on the CPU; it needs {FEWEST} or "
        f"more: set NPROC={ENOUGH} in the environment, or name this backend in a call before JAX is used otherwise"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _told() -> int:
    """Threads that a client made now would have."""
    told = os.environ.get("NPROC", "")
    return int(told) if told.isdigit() else _cores()


prepare()
_threads = _told()
