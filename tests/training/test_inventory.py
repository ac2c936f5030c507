"""What data holds, and what is dropped from it."""

import json

import pytest

from slipstream.training.data import load_examples
from slipstream.training.inventory import Inventory, inventory
from slipstream.training.synthesize import regenerate

A = "abcde fgh ijk lmn opq rst uvw xyz abc def ghi jkl mno pqr stu vwx"  # 16 words
B = "the cat sat on a mat and saw how a dog ran out of the old house"


def row(*texts, **recorded):
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": content} for role, content in zip(roles, texts, strict=False)]
    return {"messages": messages, **recorded}


def write(path, *rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def files(tmp_path):
    own = [
        row("q", A, kind="code", temperature=0, finished=True),
        row("q", A + ".", kind="code", temperature=0, finished=True),  # nearly the same
        row("q", A, "r", B, kind="turns", temperature=0.7, finished=False),  # goes on with the first
        row("p", "na " * 40, kind="maths", finished=True),
        row(B, "an answer", kind="maths", finished=True),
    ]
    own, given = (
        write(tmp_path / "own.jsonl", *own),
        write(tmp_path / "given.jsonl", row("s", "something new")),
    )
    return own, given, write(tmp_path / "questions.jsonl", {"turns": [B]})


def test_conversations_without_a_question_are_counted(chat, tmp_path):
    """Dumps have them, and training skips them."""
    rows = [{"conversations": [{"from": "gpt", "value": "hi"}]}, {"messages": []}, row("q", A, finished=None)]
    report = inventory(chat, [write(tmp_path / "dump.jsonl", *rows)])
    assert report.kinds["dump"].rows == 3
    assert report.kinds["dump"].finished == round(2 / 3, 4)


def test_raw_text_keeps_its_kind(chat, tmp_path):
    """It was counted under its file's name, and written without."""
    path = write(tmp_path / "own.jsonl", {"text": A, "kind": "letters"}, {"text": B})
    report = inventory(chat, [path], out=tmp_path / "kept.jsonl")
    assert [*report.kinds] == ["letters", "own", "all"]
    assert json.loads((tmp_path / "kept.jsonl").read_text().split("\n")[0]) == {"text": A, "kind": "letters"}


def test_what_is_read_is_not_written_over(chat, tmp_path):
    """From Python: the rows that were dropped were gone from the file itself."""
    path = write(tmp_path / "own.jsonl", row("q", A), row("q", A))
    before = path.read_text()
    with pytest.raises(ValueError, match="is read by this command"):
        inventory(chat, [path], out=path)
    assert path.read_text() == before


def test_rows_are_not_written_as_raw_text(chat, tmp_path):
    """Training read the lines of JSON as text."""
    path = write(tmp_path / "own.jsonl", row("q", A))
    for name in ("kept.txt", "kept.txt.gz"):
        with pytest.raises(ValueError, match="would be read as raw text"):
            inventory(chat, [path], out=tmp_path / name)
        with pytest.raises(ValueError, match="would be read as raw text"):
            regenerate(chat, path, tmp_path / name)


def test_rows_are_not_written_plainly_under_a_gzipped_name(chat, tmp_path):
    """gunzip could not read them."""
    path = write(tmp_path / "own.jsonl", row("q", A))
    for make in (lambda out: inventory(chat, [path], out=out), lambda out: regenerate(chat, path, out)):
        with pytest.raises(ValueError, match="is written as plain text"):
            make(tmp_path / "kept.jsonl.gz")


def test_no_empty_file_is_left_where_nothing_is_kept(chat, tmp_path):
    path = write(tmp_path / "own.jsonl", row("q", "la la " * 100))
    with pytest.raises(ValueError, match=r"would hold no row \(1 loops\)"):
        inventory(chat, [path], out=tmp_path / "kept.jsonl")
    assert not (tmp_path / "kept.jsonl").exists()


def test_a_file_may_be_called_all(chat, tmp_path):
    """Its rows were shown as the sum of all kinds."""
    files = [write(tmp_path / f"{name}.jsonl", row("q", text)) for name, text in (("all", A), ("b", B))]
    report = inventory(chat, files)
    assert {kind: held.rows for kind, held in report.kinds.items()} == {"all": 1, "b": 1, "all kinds": 2}


def test_what_falls_out_is_counted_by_kind_and_left_out(chat, files, tmp_path):
    own, given, questions = files
    told = []
    report = inventory(chat, [own, given], [questions], tmp_path / "out.jsonl", lambda *n: told.append(n))
    assert told[-1] == (6, 6)
    assert [*report.kinds] == ["code", "given", "maths", "turns", "all"]
    faults = {kind: (held.excluded, held.loops, held.repeats) for kind, held in report.kinds.items()}
    assert faults == {
        "code": (0, 0, 1),
        "given": (0, 0, 0),
        "maths": (1, 1, 0),
        "turns": (1, 0, 0),  # an answer, too, may hold a question
        "all": (2, 1, 1),
    }
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["kind"] for each in kept] == ["code", "given"]
    assert report.kept["all"].rows == 2
    assert Inventory.from_json(report.to_json()) == report
    assert len(load_examples([str(tmp_path / "out.jsonl")], chat, 99)) == 2


def test_a_row_that_another_goes_on_with_is_a_repeat(chat, files):
    held = inventory(chat, files[:1]).kinds
    assert (held["code"].repeats, held["turns"].repeats) == (1, 0)


def test_figures_are_of_tokens_and_rows(chat, tmp_path):
    """A letter is a token; the template is "u QUESTION a ANSWER</s> "."""
    rows = [row("qq", "abc", temperature=0), row("q", "abcde", "r", "ab", finished=False)]
    path = write(tmp_path / "some.jsonl", *rows)
    (held,) = inventory(chat, [path]).kinds.values()
    assert (held.rows, held.finished, held.greedy, held.several_turns) == (2, 0.5, 0.5, 0.5)
    assert held.answer_tokens == 4 + 6 + 2  # with the ends of all but the answer that was cut
    assert held.answer[2] == 8
    text = str(inventory(chat, [path]))
    assert "some" in text
    assert "kept" not in text


def test_unreadable_rows_are_named(chat, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no rows"):
        inventory(chat, [path])
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1"):
        inventory(chat, [path])
    write(path, row("q", "a"))
    with pytest.raises(ValueError, match=r"output .* cannot be written"):
        inventory(chat, [path], out=path / "out.jsonl")
