"""Files: what cannot be read is said in one line, what is there is not lost, and two processes do not write
into one."""

import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.files import (
    check_counts,
    check_writable,
    evenly,
    install,
    locked,
    parsed,
    read_text,
    replacing,
    several,
    understood,
    update_json,
    write_json,
    written_to,
)


def test_none_is_nothing_and_an_output_may_lie_at_home(tmp_path, monkeypatch):
    """A directory called ~, which invites to be removed."""
    assert several(None) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert written_to("~/runs/e") == f"{tmp_path}/runs/e"
    with pytest.raises(ValueError, match="an output is named by a NoneType"):
        written_to(None)


CHECKOUT = '{"url": "file:///home/me/slipstream", "dir_info": {"editable": true}}'
WHEEL = '{"url": "file:///tmp/slipstream-0.1.0-py3-none-any.whl", "archive_info": {}}'
COPIED = '{"url": "file:///home/me/slipstream", "dir_info": {}}'


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        (CHECKOUT, "pip install -e '.[serve]'"),
        (WHEEL, "pip install 'slipstream[serve]'"),
        (COPIED, "pip install 'slipstream[serve]'"),
        (None, "pip install 'slipstream[serve]'"),  # from an index
    ],
)
def test_an_extra_is_installed_as_the_package_was(run, tmp_path, monkeypatch, origin, hint):
    """`pip install -e '.[serve]'` where there is no checkout."""
    about = tmp_path / "slipstream-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slipstream\nVersion: 0.1.0\n")
    if origin is not None:
        (about / "direct_url.json").write_text(origin)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "path", [str(tmp_path)])
        assert install("serve") == hint
    monkeypatch.setitem(sys.modules, "slipstream.serve.run", None)
    assert run("serve")[2].endswith(f"which is not installed: {install('serve')}\n")


@pytest.mark.parametrize("count", [0, -1, 2.5, "2", None, True])
def test_a_count_is_a_whole_number_above_0(count):
    with pytest.raises(ValueError, match=r"batch is .*; it must be"):
        check_counts(batch=count)


@pytest.mark.parametrize("error", [KeyError("head"), IndexError("row"), TypeError("a\nb"), RuntimeError()])
def test_what_a_foreign_file_breaks_is_one_line(error):
    says = f"checkpoint x does not fit: {type(error).__name__}"
    with pytest.raises(ValueError, match=says) as refused, understood("checkpoint x"):
        raise error
    assert "\n" not in str(refused.value)


def test_our_own_mistakes_are_not_the_users():
    """A failed assertion of ours that was reported as a file that does not fit."""
    with pytest.raises(AssertionError), understood("checkpoint x"):
        raise AssertionError


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_text_is_read_by_what_it_is_and_not_by_its_name(tmp_path, packed):
    """A byte-order mark that became part of the first line; a gzipped file without its ending."""
    (tmp_path / "a.txt").write_bytes((gzip.compress if packed else bytes)("\ufeffαβ\r\n".encode()))
    assert read_text(tmp_path / "a.txt", "text") == "αβ\n"


def test_what_is_no_file_is_refused_at_once(tmp_path):
    """/dev/zero ate the memory, a pipe nobody writes into hung, loops and names that are none were
    tracebacks."""
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"abc" * 100)[:-12])
    names = ["pipe", "loop", "cut.gz", ".", "missing", "a" * 300, "a\0b", "cut.gz/x"]
    for name in (*(f"{tmp_path}/{name}" for name in names), "/dev/zero", "/dev/full"):
        with pytest.raises(ValueError, match=r"recipe .* cannot be read: ") as refused:
            read_text(name, "recipe")
        assert "\n" not in str(refused.value)


def test_what_a_shell_hands_over_is_read():
    """`--questions <(head -3 questions.jsonl)` is a pipe."""
    code = "from slipstream.files import read_text; print(read_text('/dev/stdin', 'text'), end='')"
    done = subprocess.run([sys.executable, "-c", code], input="abc\n", capture_output=True, text=True)
    assert done.stdout == "abc\n", done.stderr


@pytest.mark.parametrize(
    ("text", "says"), [("[" * 100_000, "too deeply"), ('"\\ud800"', "surrogates"), ("{", "Expecting")]
)
def test_json_that_nobody_can_use_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        parsed(text)
    assert parsed('"\\ud83d\\ude00"') == "😀"  # two halves are a whole


def test_one_thing_may_stand_for_several():
    """A text was taken for its letters: as system messages, each of them."""
    assert several("ab") == ["ab"]
    assert several(Path("ab")) == [Path("ab")]
    assert several(0.7) == [0.7]
    assert several(("ab", "c")) == ["ab", "c"]
    assert several(()) == []


def test_counts_begin_at_one():
    """--limit 0: "0 answers, train on them"."""
    assert evenly([1, 2, 3, 4], 2) == [1, 3]
    for count in (lambda: evenly([1, 2], 0), lambda: check_counts(limit=-1)):
        with pytest.raises(ValueError, match=r"limit is -?\d; it must be at least 1"):
            count()


def test_outputs_are_neither_what_is_read_nor_each_other(tmp_path):
    """--json at the question file, or at the drafter's config.json: gone, after an hour of work."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}")
    os.symlink(tmp_path / "data.jsonl", tmp_path / "link")
    here = str(tmp_path)
    parts = ("model.safetensors.index.json", "vocab.json", "chat_template.jinja", "modeling.py")
    for part in parts:
        (tmp_path / part).write_text("")
    for name, reads in (
        *((part, here) for part in parts),
        ("data.jsonl", f"{here}/link"),
        ("link", f"{here}/data.jsonl"),
        ("config.json", here),
    ):
        with pytest.raises(ValueError, match="is read by this command"):
            check_writable(f"{here}/{name}", reads=[reads])
    for one, other in ((f"{here}/new", f"{here}/./new"), ("-", "-")):
        with pytest.raises(ValueError, match="are the same file"):
            check_writable(one, other)
    check_writable(f"{here}/data.jsonl", f"{here}/results.json", None, "-", reads=[here, "not there"])


@pytest.mark.parametrize("name", ["", "loop", "a\0b", "a" * 300, "directory", "protected"])
def test_an_output_that_cannot_be_is_refused(tmp_path, name, monkeypatch):
    (tmp_path / "directory").mkdir()
    (tmp_path / "protected").write_text("mine")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    monkeypatch.setattr(
        os, "access", lambda path, mode: "protected" not in str(path)
    )  # root may write everywhere
    with pytest.raises(ValueError, match="cannot be written: "):
        check_writable(name and f"{tmp_path}/{name}")


def test_results_that_do_not_go_where_they_should_go_elsewhere(tmp_path, monkeypatch):
    """The disk was full at the end: the figures of an hour were gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match=r"No space left on device; the results are in .*\.json") as refused:
        write_json("/dev/full", {"τ": 2})
    assert json.loads(Path(str(refused.value).rsplit(" ", 1)[1]).read_text("utf-8")) == {"τ": 2}


def test_files_of_similar_names_are_written_at_once(tmp_path):
    """Threads, and containers on one disk, whose processes have one number: one took the other's half-written
    file for its own."""
    paths = [tmp_path / f"{'a' * 40}{i}.json" for i in range(2)]
    with replacing(str(paths[0])) as one, replacing(str(paths[1])) as other:
        one.write("1" * 9)
        other.write("2")
    assert [path.read_text() for path in paths] == ["1" * 9, "2"]


@pytest.mark.parametrize("name", ["a" * 45, "ä" * 120])
def test_files_of_similar_names_are_locked_apart(tmp_path, name):
    """Two runs of synthesize, into answers of seed 1 and of seed 2: the second was refused."""
    one, other = (tmp_path / f"{name}{i}.jsonl" for i in range(2))
    with locked(one), locked(other), pytest.raises(ValueError, match="is being written by"), locked(other):
        pass
    assert not [*tmp_path.iterdir()]


def test_what_is_replaced_keeps_its_permissions(tmp_path):
    """A private file that everybody could read behind its second writing."""
    path = tmp_path / "private.json"
    path.write_text("{}")
    path.chmod(0o600)
    write_json(str(path), {"a": 1})
    assert path.stat().st_mode & 0o777 == 0o600


def test_standard_output_and_long_names_are_written(tmp_path, capsys):
    write_json("-", {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    with replacing(str(tmp_path / ("ä" * 120))) as file:
        file.write("x")
    assert [path.name for path in tmp_path.iterdir()] == ["ä" * 120]


@pytest.mark.parametrize("text", ["{half", "[]", '{"a machine": 3}', "{}"])
def test_a_damaged_file_of_results_is_not_overwritten(tmp_path, text):
    """What tune had measured on other machines, dropped without a word."""
    path = tmp_path / "costs.json"
    path.write_text(text)
    if text == "{}":
        update_json(path, {"here": {"a": 1}})
        assert json.loads(path.read_text()) == {"here": {"a": 1}}
        return
    with pytest.raises(ValueError, match=r"costs\.json"):
        update_json(path, {"here": {"a": 1}})
    assert path.read_text() == text


def test_results_that_are_put_into_one_file_at_once_are_all_kept(tmp_path):
    """Each writer replaced the file by what it had read, and its own."""
    path = tmp_path / "costs.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: update_json(path, {"here": {str(i): i}}), range(64)))
    assert json.loads(path.read_text()) == {"here": {str(i): i for i in range(64)}}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["file.jsonl", "."])
def test_one_process_writes_and_the_second_is_told_which(tmp_path, name):
    """Two runs on one --out: both said success over a mixed file. And a lock that outlives its process locks
    for good."""
    path = tmp_path / name
    code = (
        f"from slipstream.files import locked\nwith locked({str(path)!r}):\n print(1, flush=True)\n input()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"1\n"
    with (
        pytest.raises(ValueError, match=rf"is being written by process {other.pid} on \S+ since 20"),
        locked(path),
    ):
        pass
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    with locked(path), pytest.raises(ValueError, match=f"process {os.getpid()} on"), locked(path):
        pass
    assert not list(tmp_path.iterdir())
