"""What a compiler made of a kernel for sm_90: read off PTX and machine code, with no GPU in the machine."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ARCH = "sm_90a"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    ptx: PTX text; sass: disassembled machine code, None where no disassembler is installed; registers: per thread;
    spills: bytes stored to and loaded from local memory because registers ran out; shared_bytes: shared memory of a
    thread block, static and dynamic together.
    """

    ptx: str
    sass: str | None
    registers: int
    spills: int
    shared_bytes: int


def compile_ptx(ptx: str, shared_bytes: int = 0) -> Compiled:
    """Assemble PTX for sm_90a with ptxas and read its resource report.

    shared_bytes: dynamic shared memory that the launcher adds (bytes); ptxas reports the static part.
    Raises RuntimeError with ptxas's own message where it refuses the code.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [_tool("ptxas"), f"-arch={ARCH}", "-v", str(source), "-o", str(cubin)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"ptxas for {ARCH} failed: {result.stderr.strip()}")
        report = result.stderr + result.stdout
        sass = _disassemble(cubin)
    static = sum(int(b) for b in re.findall(r"(\d+) bytes smem", report))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return Compiled(
        ptx=ptx,
        sass=sass,
        registers=max(int(r) for r in re.findall(r"Used (\d+) registers", report)),
        spills=sum(int(stores) + int(loads) for stores, loads in spills),
        shared_bytes=static + shared_bytes,
    )


@functools.cache
def _tool(name: str) -> str:
    """Path of a CUDA binary: Triton ships them; else the one on PATH."""
    import triton

    shipped = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    found = str(shipped) if shipped.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} not found: neither in the triton package nor on PATH; install triton or CUDA")
    return found


def _disassemble(cubin: Path) -> str | None:
    try:
        tool = _tool("cuobjdump")
        nvdisasm = Path(_tool("nvdisasm"))
    except RuntimeError:
        return None
    result = subprocess.run(
        [tool, "-sass", str(cubin)], capture_output=True, text=True, env={"PATH": str(nvdisasm.parent)}
    )
    return result.stdout if result.returncode == 0 else None
