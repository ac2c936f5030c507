"""The machine: what a figure was measured on, and its memory."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from slipstream.kernels.build import HAS_AMX
from slipstream.kernels.weight_packing import HAS_BF16

SCHEMA = 1
GIT = ("git", "--no-optional-locks")  # which a command that is killed would leave locked
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def hardware() -> dict[str, Any]:
    """Processor, cores in use, memory and accelerator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = {"cpu": _cpu(), "threads": torch.get_num_threads(), "memory_gib": round(memory / 2**30, 1)}
    return parts | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


@contextmanager
def memory_kept() -> Iterator[None]:
    """Inside, the process keeps the memory of freed tensors for the next ones. Otherwise glibc gives large
    ones back, and a CPU spends a fourth of a training step on being given the same pages, zeroed."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:  # as in a process that has had large tensors
        libc.mallopt(M_MMAP_MAX, 2**16)
        libc.mallopt(M_TRIM_THRESHOLD, 2**26)
        libc.malloc_trim(0)


def available_memory() -> float:
    """Bytes that can be had without swapping, and within a container's limit; infinite where the system does
    not say."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        system = 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        system = float("inf")
    return min(system, *(left_in_group(Path(home)) for home in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")))


def left_in_group(home: Path) -> float:
    """Bytes that a control group, of version 2 or 1, may still take; infinite without a limit. Cached files
    count as free."""
    old = (home / "memory.limit_in_bytes").exists()
    limit, used = ("limit_in_bytes", "usage_in_bytes") if old else ("max", "current")
    try:
        most, taken = (int((home / f"memory.{name}").read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (home / "memory.stat").read_text().splitlines())
        files = sum(int(stat[f"{'total_' * old}{kind}_file"]) for kind in ("active", "inactive"))
    except (OSError, KeyError, ValueError):  # "max" is no number
        return float("inf")
    return max(0.0, float(most - taken + files))


def peak_memory(device: torch.device) -> Callable[[], float | None]:
    """Measures from now on. Returns what tells the most memory that this process has used since, in MiB: on
    the device, or on a CPU in all, mapped weights included. None where the system does not say."""
    process = Path("/proc/self")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    with suppress(OSError):
        (process / "clear_refs").write_text("5")  # Linux forgets the peak of before

    def peak() -> float | None:
        with suppress(OSError, KeyError, ValueError):
            lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            return round(int(lines["VmHWM"].split()[0]) / 1024, 1)
        return None

    return peak


def where(device: torch.device) -> str:
    """The processor, with its threads, or the accelerator."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu()} × {torch.get_num_threads()}"


def versions() -> dict[str, str]:
    """Of everything a figure depends on, the commit included where there is one."""
    packages = {name: version(name) for name in ("slipstream", "torch", "transformers")}
    return {**packages, "python": platform.python_version(), "commit": _commit()}


def _cpu() -> str:
    name = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    name = name or platform.processor() or platform.machine()
    units = [torch.backends.cpu.get_cpu_capability(), "bf16" * HAS_BF16, "AMX" * HAS_AMX]
    return f"{name} ({', '.join(filter(None, units))})"  # processors of one name may have different units


def _commit() -> str:
    def git(*words: str) -> str:
        home = Path(__file__).parent
        result = subprocess.run([*GIT, *words], cwd=home, capture_output=True, text=True, timeout=10)
        return result.stdout.strip() if result.returncode == 0 else ""

    with suppress(OSError, subprocess.TimeoutExpired):
        ours = git("ls-files", "--", Path(__file__).name)  # none where we lie in another project's
        if ours and (head := git("rev-parse", "--short=12", "HEAD")):
            return head + "+changes" * bool(git("status", "--porcelain", "--", ".."))
    return "unknown"
