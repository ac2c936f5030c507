"""What is kept in the user's cache, shown and cleared."""

import json
import os
import time

import pytest
import typer

from slipstream.cli.cache import KINDS, clear, entries

DAY = 86_400


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache with one thing of each kind, the features unused for 40 days, and what is not ours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = tmp_path / "slipstream"
    kept = {
        "fetched/smollm2.gguf": 20,
        "features/abc/final.bin": 3000,
        "compiled/x/y.so": 200,
        "kernels/avx2-0.so": 100,
        "tuned/smollm2/eagle/tuned.json": 30,
        "costs.json": 2,
        "rounds.json": 2,
        "peers/vllm/.ready": 1,
    }
    kept |= {f"Smol-{'0' * 16}/config.json": 10, f"Smol-{'0' * 16}/model.safetensors": 5000}
    for name, size in {**kept, "notes.txt": 7, "somebody-else/config.json": 7}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b" " * size)
    long_ago = time.time() - 40 * DAY
    for path in (home / "features" / "abc", home / "features" / "abc" / "final.bin"):
        os.utime(path, (long_ago, long_ago))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("theirs")
    (home / "tuned" / "link").symlink_to(outside)
    (home / f"Linked-{'1' * 16}").symlink_to(outside)
    (home / "compiled" / "out").symlink_to(outside)
    return home


def test_what_others_delete_meanwhile_is_left_out(home, monkeypatch):
    """A process that compiled: its temporary files were gone before they were counted."""
    stat = os.stat

    def gone(path, *given, **how):
        if str(path).endswith("y.so"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, *given, **how)

    monkeypatch.setattr(os, "stat", gone)
    assert {entry.kind for entry in entries()} == set(KINDS)


def test_every_kind_is_found_and_nothing_else(home):
    found = entries()
    assert {entry.kind for entry in found} == set(KINDS)
    assert found[0].name == f"Smol-{'0' * 16}"
    assert found[0].bytes >= 5010
    assert [entry.kind for entry in entries(unused_since=time.time() - 30 * DAY)] == ["features"]
    assert {entry.name for entry in entries(["costs"])} == {"costs.json", "rounds.json"}


def test_clearing_leaves_what_is_not_ours(home):
    """A link that is followed deletes somebody else's files."""
    clear(entries())
    assert entries() == []
    assert (home.parent / "outside" / "config.json").read_text() == "theirs"
    assert (home / "notes.txt").exists()
    assert (home / "somebody-else" / "config.json").exists()
    assert (home / "tuned" / "link").is_symlink()


def test_a_cache_that_is_not_there_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    assert entries() == []
    clear([])


def test_cache_is_shown_and_cleaned(home, run, tmp_path):
    code, out, _ = run("cache", "--json", str(tmp_path / "cache.json"))
    assert (code, "features/abc" in out, "40 days ago" in out) == (0, True, True)
    listed = json.loads((tmp_path / "cache.json").read_text())["entries"]
    assert {entry["kind"] for entry in listed} == set(KINDS)
    code, _, err = run("cache", "clean", "--features")
    assert (code, "would be deleted" in err, "give --yes" in err) == (2, True, True)
    assert entries(["features"])
    code, out, _ = run("cache", "clean", "--older-than", "30", "--yes")
    assert (code, "deleted" in out) == (0, True)
    assert {entry.kind for entry in entries()} == set(KINDS) - {"features"}
    code, out, _ = run("cache", "clean", "--features", "--yes")
    assert (code, "0 B in" in out) == (0, True)
    code, out, err = run("cache", "clean", "--costs", "--yes", "--json", "-")
    assert (code, len(json.loads(out)["entries"]), "deleted" in err) == (0, 2, True)


def test_ctrl_c_at_the_question_deletes_nothing(home, run, monkeypatch):
    def stopped(_):
        raise typer.Abort

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", stopped)
    code, _, err = run("cache", "clean")
    assert (code, err.strip()) == (130, "slipstream: stopped")
    assert {entry.kind for entry in entries()} == set(KINDS)
