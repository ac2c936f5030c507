"""Directories are looked at before anything is written, or torch imported."""

import pytest

from slipstream.directories import check_claim, check_drafter


@pytest.mark.parametrize("name", ["", "a\0b", "loop", "file", "a" * 300])
def test_a_name_that_is_no_directorys_is_refused(tmp_path, name):
    """An empty one was the current directory."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        check_claim(name and f"{tmp_path}/{name}", ("train",), force=True)


def test_looking_at_a_directory_makes_none(tmp_path):
    check_claim(tmp_path / "runs" / "new", ("train",))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("runs/none", "Unknown drafter: 'runs/none'"),
        ("eagel", "Did you mean 'eagle'"),
        (".", "config.json cannot be read"),
        ("hybrid:head=runs/none", "Unknown drafter: 'runs/none'"),
        ("auto:head=hybrid:head=runs/none", "Unknown drafter: 'runs/none'"),
        ("draft-model:model=./none", "Unknown target: './none'"),
    ],
)
def test_a_drafter_that_is_not_there(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        check_drafter(name)
    for known in ("auto", "eagle:tree=chain-5", "hybrid:head=eagle", "draft-model"):
        check_drafter(known)
