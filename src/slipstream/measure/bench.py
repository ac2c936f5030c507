"""bench: drafters beside both baselines, in alternation, on the same prompts; sweep: several such runs."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from os import PathLike
from typing import Any

from slipstream.core.sampling import Sampling
from slipstream.drafters.proposer import Proposer
from slipstream.engine.engine import Seconds
from slipstream.files import check_counts, check_given, note, several
from slipstream.machine import hardware, versions
from slipstream.measure.bootstrap import QuestionResult, paired, together
from slipstream.measure.datasets import Question, Questions, batches, load_questions
from slipstream.measure.metrics import TINY, Tally, expected, factors
from slipstream.measure.results import (
    BASELINES,
    HF,
    BenchReport,
    BenchSettings,
    DrafterResult,
    HFResult,
    Speed,
    Speedup,
    Sweep,
    Turn,
)
from slipstream.measure.resume import UNFINISHED, check_goes_on, fingerprint, marks, reported
from slipstream.measure.runner import Drafters, Runner, first_prompts, prompt_of
from slipstream.provenance import public
from slipstream.results import heading, made
from slipstream.targets import HFTarget
from slipstream.targets.load import AnyTarget, loaded


@public
def bench(
    target: AnyTarget,
    drafters: Drafters = "auto",
    questions: Questions = (),
    *,
    limit: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    batch: int = 1,
    seed: int = 0,
    begun: BenchReport | None = None,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[BenchReport], None] = lambda _: None,
) -> BenchReport:
    """Answer every turn of every question with plain decoding, Hugging Face generate and drafters, and
    compare. `sweep` does so for several targets, temperatures and batches.

    All methods answer a turn before the next turn is asked, in an order that rotates, so that a machine that
    slows down slows all of them. A later turn continues plain decoding's conversation, so that all methods
    read the same prompts. Answers that differ from plain decoding's are audited, which is not timed. Files
    take turns.

    Args:
        target: a target, or the name of one, which is loaded with `load_target`'s defaults.
        drafters: names or directories with options, as `load_drafter` takes them, or drafters by a name.
        questions: questions, files, or data sets (`hf:openai/gsm8k:test`); default: the project's own.
        limit: questions of each file, taken evenly over it.
        max_new_tokens: tokens per answer, at most.
        temperature, seed: see `Sampling`. Hugging Face's generate draws by torch's generator, with this seed.
        batch: questions of a file that are asked at once. They share time equally, and intervals draw them
            together. Figures of passes are one text's.
        begun: the report of a run that did not end, which is gone on with.
        progress: called with the name of each step.
        keep: called with a report over what all methods answered, whose `stopped` says why it is no whole
            one: after each group of questions, and where an error or Ctrl-C ends the run.

    Returns:
        Figures over all turns and by category, file and question.

    Raises:
        ValueError: a drafter, a file or a setting is unknown or out of range, a question leaves no room for
            an answer, or `begun` was begun under other settings, by another version or on another machine.
    """
    check_counts(batch=batch)
    asked = load_questions(questions, limit)
    target = loaded(target)
    run = _Bench(Runner.of(target, drafters, max_new_tokens, temperature, seed, batch), asked)
    if begun is not None:
        run.go_on(begun, progress)
        if begun.stopped is None:
            return begun
    progress("warming up")
    run.runner.warm_up(first_prompts(target, asked, max_new_tokens)[0])
    with reported(keep, lambda reason: run.report(reason) if run.turns else None):
        answered = {turn.group for turn in run.turns}
        for number in sorted({*range(len(run.groups))} - answered):
            run.ask(number, progress)
            keep(run.report(UNFINISHED))
    return run.report()


def steps(questions: Sequence[Question], drafters: int, batch: int = 1) -> int:
    """How often `bench` calls `progress`; `drafters`: beside plain decoding."""
    return 1 + sum(map(_longest, batches(questions, batch))) * (2 + drafters)


def _longest(group: Sequence[Question]) -> int:
    """The most turns of a question."""
    return max(len(question.turns) for question in group)


class _Bench:
    """A run under way: questions in groups that are asked at once, the turns that all methods have answered,
    and their figures."""

    def __init__(self, runner: Runner, asked: Sequence[Question]) -> None:
        self.runner, self.groups = runner, batches(asked, runner.batch)
        self.questions = {question.name: question for question in asked}
        self.turns = list[Turn]()
        self.by_question: dict[str, dict[str, QuestionResult]] = {}  # by method, when they are reported
        self.settings = BenchSettings(
            drafters=[*runner.drafters],
            questions=[*self.questions],
            temperature=runner.temperature,
            batch=runner.batch,
            weights=runner.target.stamp,
            texts=fingerprint([question.turns for question in asked]),
            fingerprint=fingerprint([marks(drafter) for drafter in runner.drafters.values()]),
        )
        self.fields = {
            **heading(runner.target),
            "exactness": runner.exactness,
            "margin": runner.target.margin,
            **runner.settings,
            "batch": runner.batch,
        }

    def go_on(self, begun: BenchReport, progress: Callable[[str], None]) -> None:
        """Take over the whole groups of an earlier run. Raises ValueError where it was another run."""
        check_goes_on("run", begun, self.fields, self.settings)
        forgetful = [name for name, drafter in self.runner.drafters.items() if drafter.remembers]
        if begun.stopped is not None and forgetful:
            note(f"the run begins anew: its file does not hold the answers that {forgetful[0]} remembers")
            return
        for number, group in enumerate(self.groups):
            turns = [turn for turn in begun.turns if turn.group == number]
            if len(turns) < sum(len(question.turns) for question in group):
                break
            self.turns += turns
            for _ in range(_longest(group) * len(self.runner.methods)):
                progress("known from the unfinished run")

    def ask(self, number: int, progress: Callable[[str], None]) -> None:
        """Ask all methods every turn of a group. A turn counts once all of them have answered it."""
        runner, methods, text = self.runner, self.runner.methods, self.runner.target.text
        group = self.groups[number]
        assert text is not None  # the first prompts were text
        chats: dict[str, list[dict[str, str]]] = {question.name: [] for question in group}
        # Each method is first equally often, in first turns and in later ones, with questions of every file.
        earlier = sum(other[0].file == group[0].file for other in self.groups[:number])
        for turn in range(_longest(group)):
            asked = [question for question in group if turn < len(question.turns)]
            prompts = []
            for question in asked:
                content, chat = question.turns[turn], chats[question.name]
                chat.append({"role": "user", "content": content})
                request = chat if text.has_chat else content
                prompts.append(prompt_of(runner.target, question, turn, request, runner.max_new_tokens))
            first, answers = (earlier + turn) % len(methods), {}
            for name in methods[first:] + methods[:first]:
                progress(f"{asked[0].name} {name}")
                answers[name] = runner.ask_all(name, prompts)
            for i, question in enumerate(asked):
                plain, counted = answers["vanilla"][i], {}
                for name in methods:
                    answer = answers[name][i]
                    if name != HF and runner.keeps_text(name):
                        answer = runner.audited(name, answer, plain, question, prompts[i], turn)
                    counted[name] = answer.counted
                self.turns.append(Turn(question=question.name, turn=turn, group=number, given=counted))
                chats[question.name].append({"role": "assistant", "content": text.decode(plain.tokens)})

    def report(self, stopped: str | None = None) -> BenchReport:
        self.by_question = {method: self._by_question(method) for method in self.runner.methods}
        hf = _tally(self.turns, HF)
        report = BenchReport(
            **self.fields,
            prompts=[*self.by_question[HF]],
            settings=self.settings,
            hf_generate=HFResult(
                tokens_per_second=round(hf.tokens_per_second, 2),
                new_tokens=hf.new_tokens,
                memory_mib=hf.memory_mib,
                by_question=self.by_question[HF],
            ),
            results=[self._result(name) for name in self.runner.drafters],
        )
        return report.stopped_by(stopped, turns=[*self.turns])

    def _result(self, name: str) -> DrafterResult:
        tally, plain = _tally(self.turns, name), _tally(self.turns, "vanilla")
        drafter, ours = self.runner.drafters[name], self.by_question[name]
        exact, decoding = self.runner.keeps_text(name), tally.seconds.total - tally.seconds.prefill
        return DrafterResult(
            drafter=name,
            **dict(self._speed(name, self.turns)),
            tree=drafter.tree_spec.name if isinstance(drafter, Proposer) else None,
            rows=drafter.rows,
            target_passes=len(tally.rounds),
            shared_rounds=None if tally.shared is None else round(tally.shared, 2),
            acceptance_by_depth=tally.acceptance(conditional=False),
            acceptance_by_depth_conditional=tally.acceptance(conditional=True),
            law=drafter.law,
            identical=all(answer.identical for answer in tally.answers) if exact else None,
            unexplained=tally.unexplained,
            divergences=tally.differences,
            seconds=Seconds(**{part: round(seconds, 3) for part, seconds in vars(tally.seconds).items()}),
            host_share=round(tally.seconds.host / decoding, 4) if decoding else 0.0,
            memory_mib=tally.memory_mib,
            expected=expected(tally, plain),
            ledger=factors(tally, plain),
            by_category={key: self._speed(name, turns) for key, turns in self._grouped("category").items()},
            by_file={key: self._speed(name, turns) for key, turns in self._grouped("file").items()},
            by_question=ours,
            of_files={base: paired(ours, self.by_question[base]) for base in BASELINES},
        )

    def _grouped(self, part: str) -> dict[str, list[Turn]]:
        """The turns by an attribute of their questions."""
        groups: dict[str, list[Turn]] = {}
        for turn in self.turns:
            groups.setdefault(getattr(self.questions[turn.question], part), []).append(turn)
        return groups

    def _by_question(self, method: str) -> dict[str, QuestionResult]:
        results = {}
        for name, turns in self._grouped("name").items():
            question, tally = self.questions[name], _tally(turns, method)
            fields: dict[str, Any] = {"new_tokens": tally.new_tokens, "seconds": round(tally.wall, 4)}
            if question.category != question.file:
                fields["category"] = question.category
            if self.runner.batch > 1:
                fields["group"] = turns[0].group
            results[name] = QuestionResult(file=question.file, **fields)
        return results

    def _speed(self, name: str, turns: Sequence[Turn]) -> Speed:
        """τ, speed, and ratios of tokens per second, so that answers of different length compare."""
        tally, *bases = (_tally(turns, method) for method in (name, *BASELINES))
        asked = dict.fromkeys(turn.question for turn in turns)
        ours, *theirs = ({q: self.by_question[method][q] for q in asked} for method in (name, *BASELINES))
        speed = tally.tokens_per_second
        over = (round(speed / max(base.tokens_per_second, TINY), 3) for base in bases)
        return Speed(
            questions=len(turns),
            new_tokens=tally.new_tokens,
            tau=round(tally.tau, 4),
            tokens_per_second=round(speed, 2),
            speedup=Speedup(**dict(zip(BASELINES, over, strict=True))),
            intervals={base: together(ours, other) for base, other in zip(BASELINES, theirs, strict=True)},
        )


def _tally(turns: Sequence[Turn], method: str) -> Tally:
    return Tally(turn.given[method] for turn in turns)


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
    known = {_place(run): run for run in begun.runs} if begun else {}
    runs = dict(known)
    fields = {"max_new_tokens": max_new_tokens, "seed": seed, "hardware": hardware(), "versions": versions()}
    settings = {
        "drafters": [*dict.fromkeys(("vanilla", *several(drafters)))],
        "questions": [question.name for question in asked],
        "texts": fingerprint([question.turns for question in asked]),
    }
    for run in known.values():  # which may not be asked now
        check_goes_on("sweep", run, fields, settings if run.settings else {})
    stamps = {_place(run)[:3]: run.settings.weights for run in known.values() if run.settings}

    def report(stopped: str | None) -> Sweep:
        return Sweep(**made(), stopped=stopped, runs=[*runs.values()])

    def store(run: BenchReport) -> None:
        runs[_place(run)] = run
        if run.stopped == UNFINISHED:
            keep(report(UNFINISHED))

    options: Any = {"max_new_tokens": max_new_tokens, "seed": seed, "progress": progress, "keep": store}
    with reported(keep, lambda reason: report(reason) if runs != known else None):
        for named in [targets] if isinstance(targets, (str, PathLike, HFTarget)) else targets:
            target = loaded(named)
            model = (target.name, target.precision, target.compiles)
            if stamps.setdefault(model, target.stamp) != target.stamp:
                raise ValueError(
                    f"two targets are called {target.name}: name each, HFTarget(model, tokenizer, name), and "
                    "otherwise than in a sweep that is gone on with"
                )
            for temperature, batch in product(dict.fromkeys(temperatures), dict.fromkeys(batches)):
                place = (*model, float(temperature), batch)
                options |= {"temperature": temperature, "batch": batch, "begun": runs.get(place)}
                runs[place] = bench(target, drafters, asked, **options)
            del named, target  # their memory is the next one's
    return report(next((run.stopped for run in runs.values() if run.stopped), None))


def _place(run: BenchReport) -> tuple[str, str, bool, float, int]:
    return run.target, run.dtype, run.compiled, run.temperature, run.batch
