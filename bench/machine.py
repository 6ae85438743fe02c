"""The machine that a run happens on: GPU, versions, clocks and power, cache flush, GPU clock.

`Machine` is a GPU; `Rehearsal` walks through the same suite on the CPU, with the backends' interpreters and the host's
clock in place of the GPU's. A rehearsal's times mean nothing and are labelled so; it exists to find mistakes in the
suite where there is no GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from backends import mosaic_interpreter
from bench.clock import Clock, KernelRecord, open_clock
from bench.turns import Turns
from bench.watch import Others, parse_processes

PACKAGES = ("torch", "triton", "jax", "jaxlib", "jax-triton", "cupti-python", "numpy", "pytest-benchmark")
_SMI_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks.max.sm")
_SMI_KEYS = ("sm_mhz", "memory_mhz", "watts", "celsius", "highest_sm_mhz")
_SMI_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The second is the name before driver 535."""
_SMI_PROCESSES_EVERY = 30.0
"""Seconds between two looks at the processes where nvidia-smi has to be started for each."""


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter to a time; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def smi(fields: tuple[str, ...]) -> dict[str, str]:
    """nvidia-smi's answer for these fields of CUDA's first GPU; empty where there is no nvidia-smi or no GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={gpu_id()}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.strip().split(",")), strict=False))


def gpu_id() -> str:
    """Index or UUID of the GPU that CUDA numbers 0, for nvidia-smi and NVML, which know no CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def gpu_uuid() -> str:
    """UUID of the GPU that CUDA numbers 0, however CUDA_VISIBLE_DEVICES names it; what that says without nvidia-smi."""
    return smi(("uuid",)).get("uuid") or gpu_id()


def gpu_key(name: str) -> str:
    """Folder name of a GPU's results: "h200" for "NVIDIA H200"; a slug of the name for one that is not in the table."""
    from shared.gpus import gpus

    for key, gpu in gpus().items():
        if gpu.name == name:
            return key
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


class Device(Protocol):
    """What the suite needs of the machine that it runs on."""

    interpret: bool
    torch_device: str
    gpu: str

    @property
    def clock(self) -> Clock: ...

    def synchronize(self) -> None: ...

    def flush(self) -> None:
        """Evict L2 and wait until that is done."""

    def ceilings(self) -> dict[str, float]: ...

    def plain_reads(self) -> list[dict[str, Any]]:
        """What a kernel takes that does nothing but read, by size, as reads.measure gives it."""

    def state(self) -> dict[str, Any]:
        """{"sm_mhz", "highest_sm_mhz", "memory_mhz", "watts", "celsius", "clock_reasons", "others"} now.

        clock_reasons: NVML's bits (watch.SLOWED); others: other processes, as watch.parse_processes gives them. What
        cannot be read is left out.
        """

    def lost(self) -> str | None:
        """What the driver says where this process can use the GPU no more, as after an illegal access; else None."""


class Machine:
    """The first CUDA GPU."""

    interpret = False
    torch_device = "cuda"

    def __init__(self, clock: str, turns: Turns | None = None) -> None:
        """turns: among the processes that share the GPU by turns; it is this one's now."""
        self._read, self._processes = _nvml() or _smi_readers()
        before = self._processes(fresh=True)
        self.clock = open_clock(clock)  # before the CUDA context is made, as CUPTI advises
        import torch

        from bench.cold import Flush

        properties = torch.cuda.get_device_properties(0)
        self.gpu = properties.name
        self.flush_l2 = Flush(properties.L2_cache_size)
        self._ceilings: dict[str, float] | None = None
        self.flush()
        self._others = Others(os.getpid(), before)
        self._others.among(self._processes(fresh=True))
        self._turns = turns
        if turns is not None:
            turns.join(self._others.own)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()  # the whole context: JAX uses the same one

    def flush(self) -> None:
        self.flush_l2()
        self.synchronize()

    def ceilings(self) -> dict[str, float]:
        if self._ceilings is None:
            from bench.cold import measure_ceilings

            self._ceilings = measure_ceilings(self.clock)
        return self._ceilings

    def plain_reads(self) -> list[dict[str, Any]]:
        from bench import reads

        return reads.measure(self)

    def state(self) -> dict[str, Any]:
        others = self._others.among(self._processes())
        if others and self._turns is not None:
            sharing = self._turns.pids()
            others = [process for process in others if process["pid"] not in sharing]
        return {**self._read(), **({"others": others} if others else {})}

    def lost(self) -> str | None:
        try:
            self.synchronize()
        except RuntimeError as error:
            return str(error).strip().splitlines()[0]
        return None


Reader = Callable[[], dict[str, Any]]


class Processes(Protocol):
    def __call__(self, *, fresh: bool = False) -> list[dict[str, Any]]:
        """Processes that use the GPU, as watch.parse_processes gives them. fresh: not those of a look before."""


def _nvml() -> tuple[Reader, Processes] | None:
    """Clocks and power, and processes, through NVML (microseconds where nvidia-smi takes 50 ms); None without it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        which = gpu_id()
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(which)) if which.isdigit() else by_uuid(which)
        reasons = getattr(
            pynvml, "nvmlDeviceGetCurrentClocksEventReasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )

        def state() -> dict[str, Any]:
            return {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                "highest_sm_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "clock_reasons": reasons(handle),
            }

        def processes(*, fresh: bool = False) -> list[dict[str, Any]]:
            return [
                {"pid": p.pid, "name": _process_name(p.pid), "mib": p.usedGpuMemory and p.usedGpuMemory >> 20}
                for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]

        state()
        processes()
    except Exception:  # NVML missing, or a query that this driver does not answer: nvidia-smi is asked instead
        return None
    return state, processes


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # another container's
        return "unknown"


def _smi_readers() -> tuple[Reader, Processes]:
    """The same by nvidia-smi; processes are looked for every 30 seconds, as each look starts a program."""
    names = next((name for name in _SMI_REASONS if smi((name,)).get(name, "").startswith("0x")), None)
    looked: dict[str, Any] = {"at": float("-inf"), "found": []}

    def state() -> dict[str, Any]:
        answer = smi((*_SMI_FIELDS, *([names] if names else [])))
        found: dict[str, Any] = {
            key: _number(answer[field]) for key, field in zip(_SMI_KEYS, _SMI_FIELDS, strict=True) if field in answer
        }
        if names in answer:
            found["clock_reasons"] = int(answer[names], 16)
        return found

    def processes(*, fresh: bool = False) -> list[dict[str, Any]]:
        if fresh or time.monotonic() - looked["at"] > _SMI_PROCESSES_EVERY:
            looked.update(found=smi_processes(), at=time.monotonic())
        return looked["found"]

    return state, processes


def smi_processes() -> list[dict[str, Any]]:
    """Processes that compute on the first GPU, by nvidia-smi; empty where it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [*command, f"--id={gpu_id()}"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_processes(answer)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def without_gpu_jax_stays_on_the_cpu() -> None:
    """Where there is no NVIDIA driver, keep JAX from trying its CUDA plugin, which prints a traceback, and have it take
    threads enough for the interpreters (`backends.mosaic_interpreter`).

    To be called before jax is imported; it looks at files alone, as asking a framework takes seconds.
    """
    if not any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        mosaic_interpreter.prepare()


class RehearsalClock:
    """The host's clock in place of the GPU's: one record, carrying every backend's kernel name, per synchronisation."""

    name = "rehearsal"

    def __init__(self) -> None:
        from backends import registry

        self._name = " ".join(registry.load(name).KERNEL_NAME for name in registry.BACKENDS)
        self.reset()

    def reset(self) -> None:
        self._since = time.perf_counter()
        self._found: list[KernelRecord] = []

    def synchronized(self) -> None:
        now = time.perf_counter()
        self._found.append(KernelRecord(self._name, now - self._since))
        self._since = now

    def records(self) -> list[KernelRecord]:
        found = self._found
        self.reset()
        return found

    def pause(self) -> None:
        pass


class Rehearsal:
    """The CPU in place of a GPU: interpreters, host clock, nothing to flush."""

    interpret = True
    torch_device = "cpu"
    gpu = "rehearsal on the CPU"

    def __init__(self) -> None:
        self.clock: RehearsalClock = RehearsalClock()

    def synchronize(self) -> None:
        self.clock.synchronized()

    def flush(self) -> None:
        pass

    def ceilings(self) -> dict[str, float]:
        return {"read_bytes_per_s": 1e10, "bf16_flops": 1e11, "fp8_flops": 1e11}

    def plain_reads(self) -> list[dict[str, Any]]:
        from bench import reads

        return [{"bytes": size, "us": size / 1e4, "design": "rehearsal"} for size in reads.SIZES]

    def state(self) -> dict[str, Any]:
        return {}

    def lost(self) -> str | None:
        return None
