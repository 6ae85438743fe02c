"""Compile a Pallas Mosaic GPU kernel for sm_90a on a machine with no GPU and no CUDA driver.

JAX lowers such a kernel to MLIR for an abstract device; the rest of the compiler (MLIR to PTX) lives in JAX's CUDA
plugin and asks the driver for one thing only, the compute capability of the current device. A child process therefore
runs it beside a driver library of five functions, built here with the system's C compiler, whose device is a Hopper
GPU. The child, which imports no JAX, writes the PTX and ends; nothing in this process loads that library.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.experimental.mosaic.gpu  # tells the child, in the environment, where ptxas and libdevice are

from backends import xla_compile
from backends.compiled import Compiled, compile_ptx

_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no driver: compiling only"; return 0; }
"""
"""Attribute 75 is the compute capability's major part, 76 its minor one: 9.0."""

_CHILD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
library.MosaicGpuCompile.restype = ctypes.c_void_p
module = open(sys.argv[2], "rb").read()
library.MosaicGpuCompile(module, len(module))
"""


def compile_kernel(
    call: Callable, arguments: Sequence[jax.ShapeDtypeStruct | None], name: str, shared_bytes: int
) -> Compiled:
    """The Mosaic kernel in `call(*arguments)`, compiled for sm_90a.

    arguments: jax.ShapeDtypeStructs (or None); name: substring of the kernel's name; shared_bytes: its dynamic shared
    memory, which the launcher sets and ptxas does not see.
    Raises RuntimeError where a part of the compiler is missing or refuses the kernel.
    """
    # Mosaic writes PTX ISA 9.0. The ptxas that the triton package ships reads 8.8, and nothing newer is used.
    ptx = re.sub(r"(?m)^\.version 9\.\d", ".version 8.8", _ptx(lower(call, arguments, name)))
    return compile_ptx(ptx, shared_bytes)


def lower(call: Callable, arguments: Sequence[jax.ShapeDtypeStruct | None], name: str) -> bytes:
    """MLIR bytecode of the one Mosaic kernel in `call(*arguments)`, lowered for an abstract H100."""
    from jaxlib.mlir import ir

    module = xla_compile.lower(call, arguments).compiler_ir()
    calls = [c for c in xla_compile.custom_calls(module) if "mosaic_gpu" in str(c.attributes["call_target_name"])]
    if len(calls) != 1:
        raise RuntimeError(f"expected one Mosaic kernel, {name}; the program calls {len(calls)}")
    return ir.StringAttr(calls[0].attributes["mhlo.backend_config"]["module"]).value_bytes


def _ptx(module: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.mlirbc")
        source.write_bytes(module)
        environment = os.environ | {
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, (str(_driver().parent), os.environ.get("LD_LIBRARY_PATH")))
            ),
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_TO": folder,
        }
        command = [sys.executable, "-c", _CHILD, xla_compile.plugin_library(), str(source)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        written = list(Path(folder).glob("*.ptx"))
        if not written:
            raise RuntimeError(f"Mosaic GPU's compiler wrote no PTX: {(child.stderr + child.stdout).strip()[-2000:]}")
        return written[0].read_text()


@functools.cache
def _driver() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(
            "no C compiler (cc, gcc, clang) on PATH: install one to compile Mosaic kernels without a GPU"
        )
    folder = Path(_FOLDER.name)
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, capture_output=True)
    return library


_FOLDER = tempfile.TemporaryDirectory(prefix="mosaic-driver-")
