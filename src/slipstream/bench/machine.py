"""What a figure was measured on, and where results are written."""

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch

from slipstream.targets.hf import Target

SCHEMA = 1


def heading(target: Target) -> dict[str, Any]:
    """What every results file begins with."""
    dtype = str(target.dtype).removeprefix("torch.")
    about = {"schema": SCHEMA, "hardware": hardware(), "versions": versions()}
    return {**about, "target": target.name, "dtype": dtype}


def hardware() -> dict[str, Any]:
    """Processor, cores in use, memory and accelerator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    about = {"cpu": _cpu(), "threads": torch.get_num_threads(), "memory_gib": round(memory / 2**30, 1)}
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about


def versions() -> dict[str, str]:
    """Of everything a figure depends on, the commit included where there is one."""
    packages = {name: version(name) for name in ("slipstream", "torch", "transformers")}
    return {**packages, "python": platform.python_version(), "commit": _commit()}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if head and git("status", "--porcelain", "--", "..") else "") or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def check_writable(path: str) -> None:
    """Refuse an output path before the work, not after it.

    Raises:
        ValueError: nothing can be written there.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
        if target.is_dir():
            raise IsADirectoryError(0, "it is a directory")
    except OSError as error:
        raise ValueError(
            f"output {path} cannot be written: {error.strerror}: name a file in a writable directory"
        ) from error


@contextmanager
def replacing(path: str) -> Iterator[TextIO]:
    """A file to write, put in the place of `path` once it is whole: what was there stays until then.

    Raises:
        ValueError: it cannot be written.
    """
    beside = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            yield file
        os.replace(beside, path)
    except BrokenPipeError:  # somebody else's output
        raise
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: str, data: dict[str, Any]) -> None:
    """Results, whole or not at all. Raises ValueError where they cannot be written."""
    with replacing(path) as file:
        file.write(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
