"""The machine that a run happens on: GPU, versions, clocks and power, cache flush, GPU clock.

`Machine` is a GPU; `Rehearsal` walks through the same suite on the CPU, with the backends' interpreters and the host's
clock in place of the GPU's. A rehearsal's times mean nothing and are labelled so; it exists to find mistakes in the
suite where there is no GPU.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import time
from typing import Any, Protocol

from bench.clock import Clock, KernelRecord, open_clock

PACKAGES = ("torch", "triton", "jax", "jaxlib", "jax-triton", "cupti-python", "numpy", "pytest-benchmark")
_SMI_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


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
    """nvidia-smi's answer for these fields of the first GPU; empty where there is no nvidia-smi or no GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.strip().split(",")), strict=False))


def gpu_key(name: str) -> str:
    """Folder name of a GPU's results: "h200" for "NVIDIA H200"; a slug of the name for one that is not in the table."""
    from shared.gpus import gpus

    for key, gpu in gpus().items():
        if gpu.name == name:
            return key
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


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

    def state(self) -> dict[str, Any]:
        """{"sm_mhz", "memory_mhz", "watts", "celsius"} now; empty where it cannot be read."""


class Machine:
    """The first CUDA GPU."""

    interpret = False
    torch_device = "cuda"

    def __init__(self, clock: str) -> None:
        self.clock = open_clock(clock)  # before the CUDA context is made, as CUPTI advises
        import torch

        from bench.cold import Flush

        properties = torch.cuda.get_device_properties(0)
        self.gpu = properties.name
        self.flush_l2 = Flush(properties.L2_cache_size)
        self._ceilings: dict[str, float] | None = None
        self._nvml = _nvml()

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

    def state(self) -> dict[str, Any]:
        if self._nvml is not None:
            return self._nvml()
        found = smi(_SMI_FIELDS)
        keys = ("sm_mhz", "memory_mhz", "watts", "celsius")
        return {key: _number(found[field]) for key, field in zip(keys, _SMI_FIELDS, strict=True) if field in found}


def _nvml() -> Any:
    """A function that reads clocks and power through NVML (microseconds where nvidia-smi takes 50 ms), or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)

        def state() -> dict[str, Any]:
            return {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            }

        state()
    except Exception:  # NVML missing, or a query that this driver does not answer: nvidia-smi is asked instead
        return None
    return state


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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

    def state(self) -> dict[str, Any]:
        return {}
