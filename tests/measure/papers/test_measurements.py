"""Figures from sums over questions, and what intervals decide."""

from pathlib import Path

import pytest

from slipstream.measure.papers.entry import ENTRIES, Claim, Figure
from slipstream.measure.papers.measurements import ABSENT, FAILS, HOLDS, OPEN, Cell, Measurements
from slipstream.measure.papers.reproduce_report import ReproduceReport

TABLES = Path(__file__).parents[3] / "benchmarks" / "results" / "tables.json"

COLUMNS = ["tokens", "rounds", "1", "2"]


def cell(drafter, *rows, asked="a", how="prediction", columns=COLUMNS, batch=1):
    questions = {f"{asked}:{i}": list(map(float, row)) for i, row in enumerate(rows)}
    where = {"asked": asked, "temperature": 0.0, "batch": batch, "how": how}
    return Cell(drafter=drafter, **where, columns=columns, questions=questions)


def measurements(*cells, categories=None):
    return Measurements({each.key: each for each in cells}, categories or {"a": {}, "b": {}})


def test_figures_are_ratios_of_sums():
    known = measurements(
        cell("x", (10, 4, 4, 2), (20, 16, 3, 1)), cell("x", (3, 1, 1, 1), (3, 1, 1, 1), asked="b")
    )
    assert known.value(Figure("x", ("a",)))[0] == 30 / 20
    assert known.value(Figure("x", ("a", "b")))[0] == (30 / 20 + 3) / 2  # each set counts the same
    assert known.value(Figure("x", ("a",), "0-α"))[0] == 7 / 20
    assert known.value(Figure("x", ("a",), "1-α"))[0] == round(3 / 7, 4)
    assert known.value(Figure("x", ("a",), "α"))[0] == round((7 + 3) / (20 + 7), 4)
    assert known.value(Figure("y", ("a",))) == (None, None)
    nothing = measurements(cell("x", (4, 4, 0, 0), (5, 5, 0, 0)))
    assert nothing.value(Figure("x", ("a",), "1-α")) == (None, None)  # no guess stands behind an accepted one
    assert known.questions(Figure("x", ("a", "b"))) == 2
    some = measurements(cell("x", (10, 4, 4, 2), (20, 16, 3, 1)), categories={"a": {"a:0": "c", "a:1": "d"}})
    assert some.value(Figure("x", ("a/d",))) == (20 / 16, None)  # of one question there is no interval


def test_speeds_are_over_the_same_race():
    columns = ["tokens", "seconds", "plain tokens", "plain seconds"]
    raced = measurements(cell("x", (10, 1, 10, 2), (30, 2, 20, 3), how="race", columns=columns))
    assert raced.value(Figure("x", ("a",), "× plain"))[0] == round((40 / 3) / (30 / 5), 4)
    assert raced.value(Figure("x", ("a",), "tokens/s"))[0] == round(40 / 3, 4)


def test_questions_that_were_answered_at_once_are_drawn_together():
    """They share their time: drawn one by one, as if each had been timed alone, intervals were too narrow."""
    columns = ["tokens", "seconds", "plain tokens", "plain seconds"]
    times = [(10, spent, 10, 2) for spent in (1, 1, 1, 2, 2, 2, 1, 1, 1, 2)]
    sums = [(30, 3, 30, 6), (30, 6, 30, 6), (30, 3, 30, 6), (10, 2, 10, 2)]
    how = {"how": "race", "columns": columns}
    known = measurements(cell("x", *times, batch=3, **how), cell("x", *sums, asked="b", **how))
    together, alone = Figure("x", ("a",), "× plain", batch=3), Figure("x", ("b",), "× plain")
    assert known.questions(together) == 10
    value, (low, high) = known.value(together)
    assert value == known.value(alone)[0]
    assert (low, high) == pytest.approx(known.value(alone)[1], abs=0.05)
    narrow = measurements(cell("x", *times, **how)).value(Figure("x", ("a",), "× plain"))[1]
    assert high - low > narrow[1] - narrow[0]
    whole = measurements(cell("x", *times, batch=16, **how))
    assert whole.value(Figure("x", ("a",), "× plain", batch=16)) == (value, None)  # one group says nothing


def test_what_is_compared_is_of_the_same_questions():
    """A race of four texts at once beside one of single texts, and a record that lacks a question: each side
    had draws of its own."""
    columns = ["tokens", "seconds", "plain tokens", "plain seconds"]
    speeds = [0.5, 2.0, 1.0, 1.5, 0.7, 0.6, 1.9, 1.1, 0.8, 1.4, 1.3, 0.9]
    alone = [(10, 1 / each, 10, 1) for each in speeds]
    shared = [(10, sum(1 / each for each in speeds[i // 4 * 4 :][:4]) / 3, 10, 1) for i in range(12)]
    how = {"how": "race", "columns": columns}
    known = measurements(cell("x", *alone, **how), cell("x", *shared, batch=4, **how))
    one, four = (Figure("x", ("a",), "× plain", batch=batch) for batch in (1, 4))
    verdict, _, (low, high) = known.verdict(Claim("…", one, four))
    assert verdict == HOLDS
    assert high - low < 0.5 * (known.value(four)[1][1] - known.value(four)[1][0])
    less = [(12 + 4 * (i % 3), 10 + i, 4, 2) for i in range(9)]
    more = [(row[0] + 2, *row[1:]) for row in less]
    lacking = cell("right", *less)
    lacking.questions.pop("a:4")
    claim = Claim("…", Figure("left", ("a",)), Figure("right", ("a",)))
    assert measurements(cell("left", *more), lacking).verdict(claim)[0] == HOLDS


BASE = [(10 + i, 10, 4, 2) for i in range(8)]


@pytest.mark.parametrize(
    ("left", "within", "times", "verdict"),
    [
        ([(row[0] + 3, *row[1:]) for row in BASE], None, 1, HOLDS),
        ([(row[0] - 3, *row[1:]) for row in BASE], None, 1, FAILS),
        ([(row[0] + (-1) ** i, *row[1:]) for i, row in enumerate(BASE)], None, 1, OPEN),
        ([(row[0] + 3, *row[1:]) for row in BASE], None, 1.5, FAILS),
        ([(row[0] + 0.5, *row[1:]) for row in BASE], 0.1, 1, HOLDS),
        ([(row[0] + 3, *row[1:]) for row in BASE], 0.1, 1, FAILS),
        ([(row[0] + (-3) ** (i % 2), *row[1:]) for i, row in enumerate(BASE)], 0.1, 1, OPEN),
        ([BASE[0]], None, 1, OPEN),
    ],
)
def test_intervals_decide(left, within, times, verdict):
    """Over the same questions: both sides are drawn together."""
    right = BASE if len(left) > 1 else BASE[:1]
    both = measurements(cell("left", *left), cell("right", *right))
    claim = Claim("…", Figure("left", ("a",)), Figure("right", ("a",)), within, float(times))
    assert both.verdict(claim)[0] == verdict


def test_what_was_not_measured_decides_nothing():
    claim = Claim("…", Figure("left", ("a",)), Figure("right", ("a",)))
    assert measurements(cell("left", *BASE)).verdict(claim) == (ABSENT, None, None)


def test_verdicts_of_the_stored_tables_follow_from_their_cells():
    """Verdicts on docs/tables.md that another rule, or a page's hand, had made."""
    report = ReproduceReport.read(TABLES)
    categories = {name: asked.categories for name, asked in report.settings.sets.items()}
    stored, followed = Measurements({each.key: each for each in report.cells}, categories), 0
    for table in report.tables:
        claims = {claim.text: claim for claim in ENTRIES[table.name].claims}
        for relation in table.relations:
            found = stored.verdict(claims[relation.claim]) if relation.claim in claims else (ABSENT,)
            if ABSENT not in (found[0], relation.verdict):  # of a claim that was measured otherwise then
                assert found == (relation.verdict, relation.difference, relation.interval), relation.claim
                followed += 1
    assert followed > 50
