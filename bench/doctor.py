"""What can run here, and for what cannot: why, and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.clock import CLOCKS
from bench.machine import smi, versions
from bench.peers import PEERS
from shared.config import Config
from shared.models import model

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
_COUNTERS_REMEDY = (
    "run as root, or let every user read them: options nvidia NVreg_RestrictProfilingToAdminUsers=0 in "
    "/etc/modprobe.d, then reboot"
)


def examine() -> dict[str, Any]:
    """{"versions", "gpu", "backends", "configs", "peers", "clocks", "counters"}; every reason has a remedy."""
    return {
        "versions": versions(),
        "gpu": gpu(),
        "backends": {name: backend(name) for name in _backend_names()},
        "configs": {name: config_in_force(name) for name in _backend_names()},
        "peers": {name: peer.missing() for name, peer in PEERS.items()},
        "clocks": {name: clock(name) for name in CLOCKS},
        "counters": counters(),
    }


def gpu() -> dict[str, Any]:
    """{"name", "driver", "reason"}; name None where PyTorch sees no GPU, reason says what to look at."""
    found = smi(("name", "driver_version", "memory.total", "clocks.sm", "power.draw"))
    try:
        import torch
    except ImportError as error:
        return {"name": None, "driver": found.get("driver_version"), "reason": f"{error}: pip install torch"}
    if torch.cuda.is_available():
        return {"name": torch.cuda.get_device_name(), "driver": found.get("driver_version"), "reason": None, **found}
    if found:
        reason = (
            f"the driver sees {found['name']} but torch {torch.__version__} does not: install a CUDA build of torch"
        )
    else:
        reason = "no NVIDIA GPU or driver (nvidia-smi does not answer); timings need one, everything else runs"
    return {"name": None, "driver": found.get("driver_version"), "reason": reason}


def backend(name: str) -> dict[str, str | None]:
    """{"gpu", "interpreter", "compile-only"}: None where it works, else why not and what to do."""
    from backends import registry

    try:
        module = registry.load(name)
    except ImportError as error:
        reason = f"{error}; install what is missing"
        return {"gpu": reason, "interpreter": reason, "compile-only": reason}
    problem = model("mixtral-8x7b").problem("gate-up", 8, "fp16")
    config = Config(block_m=16, block_n=64, block_k=64, num_stages=2)
    try:
        module.compile_only(problem, "column", config)
        compiles = None
    except Exception as error:  # whatever a compiler says is the answer
        compiles = _short(error)
    return {
        "gpu": module.unavailable(interpret=False),
        "interpreter": module.unavailable(interpret=True),
        "compile-only": compiles,
    }


def config_in_force(name: str) -> dict[str, str]:
    """{"for", "config", "order", "source"}: what a call of one example takes when given neither here."""
    import backends

    problem = model("mixtral-8x7b").problem("gate-up", 8, "fp16")
    choice = backends.choose_config(problem, backend=name)
    told = {"config": str(choice.config), "order": choice.order, "source": choice.source}
    return {"for": "mixtral-8x7b gate-up, 8 tokens, fp16", **told}


def clock(name: str) -> str | None:
    """None where the GPU clock of that name can be opened; tried in a child process, as CUPTI takes one user only."""
    if gpu()["name"] is None:
        return "needs a GPU"
    program = "import sys; from bench.clock import open_clock; open_clock(sys.argv[1])"
    root = Path(__file__).parent.parent
    child = subprocess.run([sys.executable, "-c", program, name], cwd=root, capture_output=True, text=True)
    return None if child.returncode == 0 else (child.stderr.strip().splitlines() or ["no message"])[-1]


def counters() -> dict[str, Any]:
    """{"permitted": True, False or None (no way to tell), "reason"}: hardware counters through ncu."""
    if not DRIVER_PARAMETERS.parent.exists() and not smi(("name",)):
        return {"permitted": False, "reason": "needs a GPU"}
    if shutil.which("ncu") is None:
        return {"permitted": False, "reason": "ncu is not on PATH: install NVIDIA Nsight Compute"}
    if os.geteuid() == 0:
        return {"permitted": True, "reason": None}
    try:
        parameters = DRIVER_PARAMETERS.read_text()
    except OSError:
        return {"permitted": None, "reason": f"{DRIVER_PARAMETERS} cannot be read; if ncu refuses: {_COUNTERS_REMEDY}"}
    if "RmProfilingAdminOnly: 1" in parameters:
        return {"permitted": False, "reason": f"the driver allows counters to root only: {_COUNTERS_REMEDY}"}
    return {"permitted": True, "reason": None}


def text(found: dict[str, Any]) -> str:
    """The report as lines."""
    lines = ["Versions"]
    lines += [f"  {name:<17} {version or 'not installed'}" for name, version in found["versions"].items()]
    card = found["gpu"]
    lines.append(f"GPU                 {card['name'] or 'none: ' + card['reason']}")
    if card["driver"]:
        lines.append(f"Driver              {card['driver']}")
    lines.append("Backends")
    for name, ways in found["backends"].items():
        for way, reason in ways.items():
            lines.append(f"  {name:<15} {way:<13} {_answer(reason)}")
    lines.append("Config in force")
    for name, told in found["configs"].items():
        lines.append(f"  {name:<15} {told['config']}, {told['order']} order ({told['source']}), for {told['for']}")
    lines.append("Peers")
    lines += [f"  {name:<23} {_answer(reason)}" for name, reason in found["peers"].items()]
    lines.append("GPU clocks")
    lines += [f"  {name:<17} {_answer(reason)}" for name, reason in found["clocks"].items()]
    permitted = {True: "permitted", False: "not permitted", None: "unknown"}[found["counters"]["permitted"]]
    reason = found["counters"]["reason"]
    lines.append(f"Hardware counters   {permitted}{': ' + reason if reason else ''}")
    return "\n".join(lines)


def _answer(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


def _backend_names() -> tuple[str, ...]:
    from backends.registry import BACKENDS

    return BACKENDS


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else 'no message'}"
