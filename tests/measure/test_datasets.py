"""Question files: ours, the user's, and malformed ones; and data sets, which a directory of files is, too."""

import builtins
import gzip
import hashlib
import json
from pathlib import Path

import pytest

from slipstream.measure.datasets import SETS, Question, batches, file_names, load_questions

CATEGORIES = {"chat", "two-turn", "math", "code", "summarization", "extraction", "translation", "editing"}


def test_our_own_questions():
    questions = load_questions()
    assert len(questions) >= 30
    assert {question.category for question in questions} == CATEGORIES
    assert all(len(question.turns) == (2 if question.category == "two-turn" else 1) for question in questions)
    assert len({question.turns for question in questions}) == len(questions)


def test_sets_that_ship(tmp_path, monkeypatch):
    """MT-bench as docs/questions.md identifies it, and all of HumanEval. A file of that name goes first."""
    monkeypatch.chdir(tmp_path)
    asked = load_questions(["mt_bench", "humaneval"])
    told = hashlib.sha256("\n".join(turn for each in asked[:80] for turn in each.turns).encode()).hexdigest()
    assert f"`{told[:16]}`" in (Path(__file__).parents[2] / "docs" / "questions.md").read_text("utf-8")
    assert [each.name for each in asked[80:]] == [f"humaneval:HumanEval/{i}" for i in range(164)]
    Path("mt_bench").write_text('{"turns": ["a"]}')
    assert [each.turns for each in load_questions(["mt_bench"])] == [("a",)]
    assert "mt_bench" in (SETS / "LICENSES").read_text("utf-8")


def test_a_limit_is_per_file_and_sees_every_category(tmp_path):
    assert {question.category for question in load_questions(limit=8)} == CATEGORIES
    paths = []
    for name in ("a.jsonl", "b.jsonl"):
        paths.append(str(tmp_path / name))
        (tmp_path / name).write_text(
            "".join(f'{{"question_id": {i}, "turns": ["q{i}"]}}\n' for i in range(5))
        )
    assert [question.name for question in load_questions(paths, 2)] == [
        "a.jsonl:0",
        "a.jsonl:2",
        "b.jsonl:0",
        "b.jsonl:2",
    ]


def test_files_of_one_name_are_told_apart(tmp_path):
    """As much of the path as it takes; the same file twice; data sets by configuration."""
    paths = [str(tmp_path / each / "data" / "q.jsonl") for each in "ab"]
    for path in paths:
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text('{"question_id": 1, "turns": ["q"]}\n')
    names = [question.name for question in load_questions([*paths, paths[1]])]
    assert len({*names}) == 3
    assert names[0].endswith("a/data/q.jsonl:1")
    assert names[2].endswith("b/data/q.jsonl (2):1")
    sets = ["hf:cais/mmlu:anatomy:test", "hf:cais/mmlu:astronomy:test", "hf:openai/gsm8k:test"]
    assert file_names(sets) == ["cais/mmlu:anatomy:test", "cais/mmlu:astronomy:test", "gsm8k"]
    assert file_names(["a/question.jsonl", "b/question.jsonl"]) == ["a/question.jsonl", "b/question.jsonl"]


def test_files_take_turns():
    asked = [
        Question(file, str(i), "c", ("q",))
        for file, count in (("a", 3), ("b", 1), ("c", 2))
        for i in range(count)
    ]
    names = [[question.name for question in group] for group in batches(asked, 1)]
    assert names == [["a:0"], ["b:0"], ["c:0"], ["a:1"], ["c:1"], ["a:2"]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "Expecting"),
        ('{"question_id": 1}', "turns"),
        ('{"turns": []}', "non-empty"),
        ('{"turns": [" "]}', "non-empty"),
        ('{"turns": "text"}', "non-empty"),
        ('["turns"]', "turns"),
        ("[" * 100_000, "too deeply"),
        ('{"turns": ["\\ud800"]}', "surrogates"),
    ],
)
def test_a_malformed_line_is_numbered(tmp_path, line, reason):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question_id": 1, "turns": ["fine"]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl line 3: .*{reason}"):
        load_questions([file])


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe", "UTF-8")]
)
def test_a_file_that_holds_no_questions(tmp_path, content, reason):
    file = tmp_path / "questions.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        load_questions([str(file)])


def test_marks_packing_and_odd_separators_are_read(tmp_path):
    """A byte-order mark, gzip, and U+2028 within a line: each was a question lost."""
    file = tmp_path / "questions.jsonl"
    file.write_bytes(gzip.compress('\ufeff{"turns": ["a\u2028b"]}\r\n{"turns": ["c"]}\n'.encode()))
    assert [question.turns for question in load_questions([str(file)])] == [("a\u2028b",), ("c",)]


def test_files_of_one_name_and_questions_of_one_number_are_told_apart(tmp_path):
    """FastChat keeps each set as question.jsonl in a directory of its own."""
    paths = []
    for name in ("mt_bench", "gsm8k"):
        (tmp_path / name).mkdir()
        paths.append(str(tmp_path / name / "question.jsonl"))
        (tmp_path / name / "question.jsonl").write_text('{"question_id": 1, "turns": ["a"]}\n' * 2)
    names = [question.name for question in load_questions(paths)]
    assert names == [f"{name}/question.jsonl:{i}" for name in ("mt_bench", "gsm8k") for i in ("1", "1 (2)")]


def test_no_two_questions_have_one_name(tmp_path):
    """A number that looks like ours, and questions given beside their file: both were counted as one."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"question_id": "{i}", "turns": ["{i}"]}}\n' for i in ("1", "1", "1 (2)")))
    asked = load_questions([str(file)])
    assert [each.id for each in asked] == ["1", "1 (2)", "1 (2) (2)"]
    again = load_questions([*asked, asked[0], str(file)])
    assert len({each.name for each in again}) == 7
    assert again[:3] == asked


def test_questions_of_a_file_are_asked_together():
    asked = [Question(file, str(i), "c", ("q",)) for file, n in (("a", 3), ("b", 2)) for i in range(n)]
    names = [[question.name for question in group] for group in batches(asked, 2)]
    assert names == [["a:0", "a:1"], ["b:0", "b:1"], ["a:2"]]


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
