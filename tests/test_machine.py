"""What a machine has, as far as it can be told without one."""

import os
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from slipstream import machine
from slipstream.machine import left_in_group

PAGES = """
import resource
import torch
from slipstream.machine import memory_kept

def pages():  # that the system gave, zeroed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def held():
    return int(open("/proc/self/statm").read().split()[1])

outside, before = pages(), held()
with memory_kept():
    for _ in range(8):
        pages()  # the heap grows until it has room
    inside, kept = pages(), held() - before
print(outside, inside, kept, held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_had_again_without_new_pages():
    """A training step was given the pages of its law anew each time: a fourth of its time. In its own
    process, as other tests leave holes in the heap that hold such tensors, too.
    """
    ran = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=True)
    outside, inside, kept, after = map(int, ran.stdout.split())
    assert inside < 0.1 * outside
    assert kept > 2**13  # pages of 4 KiB: most of the last tensor's
    assert after < 0.5 * kept


@pytest.mark.parametrize("old", [False, True])
def test_a_container_has_its_limit(tmp_path: Path, old: bool):
    """Packed copies of the weights were made as if it had its host's memory."""
    limit, used = ("limit_in_bytes", "usage_in_bytes") if old else ("max", "current")
    (tmp_path / f"memory.{limit}").write_text("1000\n")
    (tmp_path / f"memory.{used}").write_text("900\n")
    named = "total_" * old
    (tmp_path / "memory.stat").write_text(f"{named}active_file 100\n{named}inactive_file 50\n")
    assert left_in_group(tmp_path) == 250


def test_without_a_limit_there_is_none(tmp_path: Path):
    assert left_in_group(tmp_path) == inf
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert left_in_group(tmp_path) == inf


def test_to_name_the_commit_writes_nothing(tmp_path, monkeypatch):
    """It refreshed the index under a lock, which stayed where the command was killed meanwhile."""
    place = tmp_path / "src" / "own"
    place.mkdir(parents=True)
    (place / "machine.py").write_text("")
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "a"]
    for words in (["init", "-q"], ["add", "."], name):
        subprocess.run(["git", *words], cwd=tmp_path, env=os.environ | own, check=True)
    monkeypatch.setattr(machine, "__file__", str(place / "machine.py"))
    os.utime(place / "machine.py", (1, 1))  # git does not know yet that it is the same
    before = (tmp_path / ".git" / "index").read_bytes()
    assert len(machine.versions()["commit"]) == 12
    assert (tmp_path / ".git" / "index").read_bytes() == before
