"""Questions of data sets, which a directory of files is, too."""

import builtins
import json

import pytest

from slipstream.measure.questions import load_questions


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Writes rows as the test split of a data set, whose name it returns."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()

    def write(*rows):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "sums" / "test.jsonl").write_text(lines)
        return f"hf:{tmp_path / 'sums'}:test"

    return write


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"question": "1 + 1?", "answer": "2"}, ("1 + 1?",)),
        ({"turns": ["a", "b"], "category": "chat"}, ("a", "b")),
        ({"instruction": "Add.", "input": "1, 1"}, ("Add.\n\n1, 1",)),
        ({"prompt": "def f():"}, ("def f():",)),
        ({"prompt": ["a", "b"]}, ("a", "b")),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, ("a",)),
        ({"document": "Long."}, ("Summarize: Long.",)),
    ],
)
def test_columns_that_are_known(data, row, turns):
    (question,) = load_questions([data(row)])
    assert (question.name, question.turns) == ("sums:1", turns)
    assert question.category == row.get("category", "sums")


def test_what_cannot_be_read_is_one_line(data, tmp_path):
    name = data({"label": 1}, {"label": 2})
    with pytest.raises(ValueError, match="has the columns label, and none of turns, question"):
        load_questions([name])
    for row in (
        {"question": None},
        {"turns": None},
        {"turns": [1]},
        {"instruction": None},
        {"article": None},
        {"messages": ["Hi"]},
        {"question": {"text": "a"}},
    ):
        with pytest.raises(ValueError, match=r"row 1 does not fit: \w+Error: "):
            load_questions([data(row)])
    with pytest.raises(ValueError, match="row 2: question holds no text"):
        load_questions([data({"question": "a"}, {"question": " "})])
    with pytest.raises(ValueError, match=r"cannot be loaded: .*give hf:REPOSITORY:SPLIT"):
        load_questions([name.replace(":test", ":nowhere")])
    with pytest.raises(ValueError, match=r"hf:a:b:c:d is no name: give hf:REPOSITORY:SPLIT"):
        load_questions(["hf:a:b:c:d"])


def test_without_the_package_there_is_one_line(monkeypatch):
    real = builtins.__import__

    def importing(name, *others):
        if name == "datasets":
            raise ModuleNotFoundError(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ValueError, match=r"not installed: pip install .*\[datasets\]'"):
        load_questions(["hf:openai/gsm8k:test"])
