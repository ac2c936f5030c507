"""sweep: `bench` for several targets, temperatures and numbers of texts, one after the other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from os import PathLike
from typing import Any

from rich.console import Group
from rich.text import Text

from slipstream.core.sampling import Sampling
from slipstream.files import check_given, first_line, several
from slipstream.machine import hardware, versions
from slipstream.measure.bench import bench
from slipstream.measure.bench_report import BenchReport
from slipstream.measure.questions import Question, Questions, load_questions
from slipstream.measure.resume import UNFINISHED, check_same, fingerprint
from slipstream.measure.runner import Drafters
from slipstream.provenance import public
from slipstream.results import Figures, Result, made
from slipstream.targets import HFTarget
from slipstream.targets.load import AnyTarget, loaded


class Sweep(Result):
    """What `sweep` found: one run of `bench` for each target, temperature and number of texts.

    Attributes:
        stopped: the error that ended the sweep early; the runs are those until then.
    """

    stopped: str | None = None
    runs: list[BenchReport]

    def __rich__(self) -> Group:
        """A line for each drafter of each run, and in how many each is faster than plain decoding."""
        columns = ("texts", "drafter", "τ", "tok/s", "× plain", "× HF", "MiB", "same")
        table = Figures("slipstream report shows each run", "target", "T", *columns)
        for run in self.runs:
            place = (f"{run.temperature:g}", str(run.batch))
            for row in run.results:
                speeds = (f"{row.tokens_per_second:.1f}", row.over("vanilla"), row.over("hf_generate"))
                held = "" if row.memory_mib is None else f"{row.memory_mib:.0f}"
                figures = (f"{row.tau:.2f}", *speeds, held, row.sameness)
                table.add_row(run.model, *place, row.drafter, *figures)
            table.add_section()
        return Group(table, *self.verdicts())

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"target": run.model, "temperature": run.temperature, "batch": run.batch} | row
            for run in self.runs
            for row in run._rows()
        ]

    def plot(self, path: str | None = None) -> Any:
        """Tokens a second and speed-up against texts at once, as one matplotlib Figure, which a notebook
        shows and `path` (.svg or .png) keeps."""
        from slipstream.measure.report.pictures import draw_sweep

        return draw_sweep(self, path)

    def verdicts(self) -> list[Text]:
        """A sentence for each drafter."""
        found: dict[str, list[bool | None]] = {}
        for row in (row for run in self.runs for row in run.results if row.drafter != "vanilla"):
            found.setdefault(row.drafter, []).append(row.faster)
        told = []
        for name, each in found.items():
            faster, slower, undecided = (each.count(what) for what in (True, False, None))
            shares = f"faster than plain decoding in {faster} of {len(each)} runs, slower in {slower}"
            told.append(Text(f"{name} is {shares}, undecided in {undecided}"))
        return told


@public
def sweep(
    targets: AnyTarget | Iterable[AnyTarget],
    drafters: Drafters = "auto",
    questions: Questions = (),
    *,
    temperatures: float | Sequence[float] = (0.0,),
    batches: int | Sequence[int] = (1,),
    limit: int | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    begun: Sweep | None = None,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[Sweep], None] = lambda _: None,
) -> Sweep:
    """Measure drafters with several targets, at several temperatures, and for several texts at once.

    Args:
        targets: loaded one after the other. Speeds compare within a run of `bench`; runs follow each other.
        temperatures, batches: each pair of them is a run.
        begun: a sweep that is gone on with. Its runs that are not asked now stay in it.
        keep: as `bench` calls it, with all runs until then, if one of them is new.
        others: as `bench` takes them.

    Raises:
        ValueError: as `bench` does, and for two targets of one name.
    """
    asked, temperatures, batches = load_questions(questions, limit), several(temperatures), several(batches)
    check_given(temperatures=temperatures, batches=batches)
    for temperature in temperatures:
        Sampling(temperature=temperature, seed=seed)
    runs = {_place(run): run for run in begun.runs} if begun else {}
    _check_runs(runs.values(), asked, drafters, max_new_tokens=max_new_tokens, seed=seed)
    before = dict(runs)
    called = {_place(run)[:3]: run.settings.weights for run in before.values() if run.settings}

    def store(run: BenchReport) -> None:
        runs[_place(run)] = run
        if run.stopped == UNFINISHED:
            keep(_sweep(runs, UNFINISHED))

    how: Any = {"max_new_tokens": max_new_tokens, "seed": seed, "progress": progress, "keep": store}
    try:
        for each in [targets] if isinstance(targets, (str, PathLike, HFTarget)) else targets:
            target = loaded(each)
            model = (target.name, target.precision, target.compiles)
            if called.setdefault(model, target.stamp) != target.stamp:
                raise ValueError(
                    f"two targets are called {target.name}: name each, HFTarget(model, tokenizer, name), and "
                    "otherwise than in a sweep that is gone on with"
                )
            for temperature, batch in product(dict.fromkeys(temperatures), dict.fromkeys(batches)):
                place = (*model, float(temperature), batch)
                how |= {"temperature": temperature, "batch": batch, "begun": runs.get(place)}
                runs[place] = bench(target, drafters, asked, **how)
            del each, target  # their memory is the next one's
    except BaseException as error:
        if any(run is not before.get(place) for place, run in runs.items()):
            keep(_sweep(runs, first_line(error)))
        raise
    return _sweep(runs, next((run.stopped for run in runs.values() if run.stopped), None))


def _check_runs(
    runs: Iterable[BenchReport], asked: Sequence[Question], drafters: Drafters, **how: Any
) -> None:
    """Raise ValueError where a run, which may not be asked now, was asked other things than the sweep is, or
    elsewhere."""
    how |= {"hardware": hardware(), "versions": versions()}
    settings = {
        "drafters": [*dict.fromkeys(("vanilla", *several(drafters)))],
        "questions": [question.name for question in asked],
        "texts": fingerprint([question.turns for question in asked]),
    }
    for run in runs:
        check_same("sweep", {name: (getattr(run, name), now) for name, now in how.items()})
        if run.settings is not None:
            check_same("sweep", {name: (getattr(run.settings, name), now) for name, now in settings.items()})


def _place(run: BenchReport) -> tuple[str, str, bool, float, int]:
    return run.target, run.dtype, run.compiled, run.temperature, run.batch


def _sweep(runs: Mapping[Any, BenchReport], stopped: str | None) -> Sweep:
    return Sweep(**made(), stopped=stopped, runs=[*runs.values()])
