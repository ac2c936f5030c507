"""The library of kernels for the CPU: compiled once for a processor and a torch, in about half a minute, and
kept in the user's cache, unless a wheel brought it (`make wheel`)."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from slipstream.files import cache_home, locked

ROOM = Path(__file__).parent
SOURCE = ROOM / "csrc" / "ops.cpp"
BUILT = ROOM / "built"  # where a wheel holds libraries
HAS_AMX = torch.cpu._is_amx_tile_supported()
FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"]
INSTRUCTIONS = {
    "AMX": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "AVX512_BF16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "AVX512_VNNI": [*AVX512, "-mavx512vnni"],
    "AVX512": AVX512,
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}


@cache
def fingerprint() -> str:
    """What measured costs and cached weights hold for: a hash of the kernels and of the versions of
    Slipstream and torch."""
    return _hash_of([ROOM / "ops.py", ROOM / "triton.py"], version("slipstream"), torch.__version__)[:8]


def _hash_of(sources: Sequence[Path], *built_by: Any) -> str:
    """A hash of the C++ sources and others, and of what they are built by."""
    text = b"".join(path.read_bytes() for path in (*sorted(SOURCE.parent.iterdir()), *sources))
    return hashlib.sha256(text + repr(built_by).encode()).hexdigest()


def processor() -> str:
    """What this processor has of `INSTRUCTIONS`."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX512":
        return capability
    if HAS_AMX:
        return "AMX"
    if torch.cpu._is_vnni_supported():
        return "AVX512_BF16" if torch.cpu._is_avx512_bf16_supported() else "AVX512_VNNI"
    return capability


def library() -> Path:
    """The library for this processor: a wheel's, or else compiled under a lock. Raises OSError or ValueError
    where there is no compiler, it fails, or nothing can be written."""
    cpuinfo = Path("/proc/cpuinfo")
    is_intel = cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()
    home, (name, flags) = cache_home() / "kernels", _built_with(processor(), is_intel)
    if (file := _intact(BUILT, name) or _intact(home, name)) is None:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / name, wait=True):
            file = _intact(home, name) or _compile(flags, home, name)
    return file


def _built_with(kind: str, is_intel: bool) -> tuple[str, list[str]]:
    """The name of the library for processors of a kind, a key of `INSTRUCTIONS`, and its compiler's flags."""
    flags = [*FLAGS, *INSTRUCTIONS.get(kind, [])]
    if is_intel:
        flags.append("-DHALF_RATE_PAIRS")  # vdpbf16ps, beside two vfmadd231ps
    return f"{kind.lower()}-{_hash_of([], torch.__version__, flags)[:16]}", flags


def build_all(home: Path) -> None:
    """Compile a library for every kind of x86-64 into a directory, as a wheel holds them. Raises OSError."""
    home.mkdir(parents=True, exist_ok=True)
    for kind, is_intel in product(INSTRUCTIONS, (False, True)):
        name, flags = _built_with(kind, is_intel)
        if _intact(home, name) is None:
            _compile(flags, home, name)


def _intact(home: Path, name: str) -> Path | None:
    """A library whose contents have the hash in its name: loading a part of one ends the process."""
    for path in home.glob(f"{name}-*.so"):
        with suppress(OSError):  # another process that builds it anew has just removed it
            if path.stem == f"{name}-{_content(path)}":
                return path
    return None


def _content(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _compile(flags: list[str], home: Path, name: str) -> Path:
    """A new library in the place of damaged ones. Raises OSError where there is no compiler, or it fails."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise OSError(f"there is no compiler {compiler[0]}")
    for damaged in (*home.glob(f"{name}-*.so"), *home.glob(f".{name}-*")):
        damaged.unlink()
    from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths  # a sixth of a second

    print("compiling kernels for this processor, once: about half a minute", file=sys.stderr, flush=True)
    places = [*(f"-I{path}" for path in include_paths()), f"-L{TORCH_LIB_PATH}", "-ltorch_cpu", "-lc10"]
    temporary = home / f".{name}-{token_hex(8)}"  # the compiler of a process that was killed may still write
    try:
        run = subprocess.run([*compiler, *flags, str(SOURCE), *places, "-o", temporary], capture_output=True)
        if run.returncode:
            reason = run.stderr.decode(errors="replace").strip().split("\n")[0]
            raise OSError(f"{compiler[0]} failed with code {run.returncode}: {reason}")
        with open(temporary, "rb") as file:
            os.fsync(file)
        return temporary.rename(home / f"{name}-{_content(temporary)}.so")
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":  # python -m slipstream.kernels.build DIRECTORY
    build_all(Path(sys.argv[1]))
