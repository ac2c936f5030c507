"""Everything that slipstream offers, once, on one target: answer, draft in another way, train, measure, take
elsewhere.

    python examples/tour.py smollm2 /tmp/tour --epochs 2

Every public name is used here; the tests run it on a tiny model, and mypy --strict reads it.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import slipstream
from slipstream import (
    PAD,
    Drafter,
    HFTarget,
    Method,
    Sampler,
    Sampling,
    Span,
    State,
    Target,
    Tree,
    chain,
)
from slipstream.core.tree_spec import TreeSpec


@dataclass
class Heard(State):
    """The last token of each row, and how often it came before in the row: a drafter's own state."""

    again: torch.Tensor


class Stutter(Drafter):
    """Drafts that the last token comes twice, where it has done so before."""

    def __init__(self) -> None:
        self.depth, self.rows = 1, 2

    def start(self, batch: int, device: torch.device) -> Heard:
        """Nothing was heard yet."""
        none = torch.zeros(batch, dtype=torch.long, device=device)
        return Heard(none, none.bool())

    def update(self, span: Span, state: State) -> None:
        """Remember whether a token came twice."""
        assert isinstance(state, Heard)
        state.again = state.again | ((span.tokens == span.nexts) & span.mask).any(1)
        state.root = span.last(span.nexts)

    def propose(self, state: State, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        """The root, and itself once more."""
        assert isinstance(state, Heard)
        return chain(torch.stack([state.root, state.root.where(state.again, torch.tensor(PAD))], 1))


def answer(target: Target, prompt: str) -> int:
    """One answer in several ways: whatever drafts, the same text."""
    plain: slipstream.Generation = slipstream.generate(target, prompt, max_new_tokens=24, temperature=0.0)
    limits = slipstream.GrammarLimits(seconds=5.0)
    bound = slipstream.generate(target, prompt, choice=["yes", "no"], grammar_limits=limits)
    assert bound.text in ("yes", "no")
    text = plain.prompt + plain.tokens
    drafters = [
        slipstream.Vanilla(),
        slipstream.NGram(),
        slipstream.RandomDrafter(target.vocab),
        slipstream.TreeOracle([text], target.vocab),
        slipstream.load_drafter("lookahead"),
        slipstream.load_drafter(slipstream.Spec.parse("ngram").replace(depth="3")),
        slipstream.load_drafter("stutter", target),
    ]
    for drafter in drafters:
        drafted = slipstream.generate(target, prompt, drafter, max_new_tokens=24, temperature=0.0)
        print(f"{type(drafter).__name__}: τ {drafted.tau:.2f}")
        assert drafted.sampling == Sampling()
        assert drafted.tokens == plain.tokens
    assert isinstance(target, HFTarget)
    ids = torch.tensor([plain.prompt])
    how: dict[str, Any] = {"custom_generate": slipstream.custom_generate, "drafter": "ngram"}
    theirs = target.model.generate(input_ids=ids, max_new_tokens=24, do_sample=False, **how)
    assert theirs[0, ids.shape[1] :].tolist() == plain.tokens
    try:
        slipstream.generate(target, prompt, max_new_tokens=1)
    except slipstream.Interrupted as stopped:  # Ctrl-C
        print(stopped.partial)
    pieces: slipstream.Stream = slipstream.stream(target, prompt, "ngram", max_new_tokens=24, temperature=0.0)
    print("".join(pieces))
    recorded = slipstream.RecordedTarget(target, [(plain.prompt, plain.tokens)], ("final",))
    return int(recorded.lengths.sum())


def make_drafter(target: HFTarget, home: Path, epochs: float) -> str:
    """A drafter from nothing: prompts, answers, training; then there and back through a public layout."""
    answers: slipstream.Answers = slipstream.synthesize(
        target, home / "prompts.jsonl", prompts=16, max_new_tokens=16
    )
    again = slipstream.regenerate(target, answers.path, home / "answers.jsonl", max_new_tokens=16)
    held: slipstream.Inventory = slipstream.inventory(target, again.path)
    print(held)
    run: slipstream.TrainingRun = slipstream.train(
        target,
        "eagle",
        home / "eagle",
        data=[again.path],
        overrides=[f"schedule.epochs={epochs}", "head.tree=chain-3", "data.held_out_tokens=16"],
        progress=lambda seen: print(f"step {seen.step} of {seen.of}: loss {seen.loss:.3f}"),
    )
    print(run)
    public: slipstream.Conversion = slipstream.export(target, run.directory, home / "public")
    print(slipstream.import_checkpoint(target, public.directory, home / "again"))
    return run.directory


def measure(target: HFTarget, drafter: str, home: Path) -> None:
    """Which tree pays, how much, and that no token changes."""
    asked = [
        slipstream.Question("tour", "1", "chat", ("What is gravity?", "And who found it?")),
        slipstream.Question("tour", "2", "code", ("Count to ten.",)),
    ]
    tuned: slipstream.TuneReport = slipstream.tune(
        target, drafter, asked, temperatures=[0.0], max_new_tokens=16
    )
    print(tuned, tuned.temperatures[0].chosen.tree)
    seen: slipstream.DoctorReport = slipstream.doctor(target, drafter, asked, max_new_tokens=16)
    print(seen, [(each.fault, each.remedy) for each in seen.found])
    report: slipstream.BenchReport = slipstream.bench(target, ["ngram", drafter], asked, max_new_tokens=16)
    report.write(str(home / "bench.json"))
    print(slipstream.BenchReport.read(home / "bench.json"))
    wide: slipstream.Sweep = slipstream.sweep(
        [target], ["ngram"], asked, temperatures=[0.0, 1.0], batches=[2], max_new_tokens=16
    )
    print(wide, [run.temperature for run in wide.runs])
    tables: slipstream.ReproduceReport = slipstream.reproduce(
        target, ["eagle-table-5"], sets={"mt_bench": asked[1]}, heads={"eagle": drafter}, progress=print
    )
    print(tables, [relation.verdict for relation in tables.tables[0].relations])
    own = slipstream.bench(target, {"mine": Stutter()}, asked, max_new_tokens=16)
    print(f"mine: {own.results[1].speedup.vanilla:.2f} × plain decoding, by {own.command}")
    certificate: slipstream.Certificate = slipstream.certify(
        target, [drafter], asked, max_new_tokens=16, progress=print
    )
    assert certificate.certified, certificate


def compare(target: HFTarget, drafter: str, python: str) -> None:
    """The same head in vLLM, which `python` has: it accepts as much, and says the same."""
    asked = slipstream.generate(target, "What is gravity?", max_new_tokens=1).prompt
    served: slipstream.ParityReport = slipstream.parity(target, drafter, [asked], python, max_new_tokens=16)
    print(served)


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("target")
    options.add_argument("directory", type=Path)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--epochs", type=float, default=1.0)
    options.add_argument("--fetch", action="store_true", help="the target is an alias, to be fetched first")
    options.add_argument("--vllm", help="interpreter of vLLM's environment (make vllm)")
    given = options.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    slipstream.register(Method("stutter", "drafts what came twice", make=f"{__name__}:Stutter"))
    print(f"slipstream {slipstream.__version__}: {', '.join(slipstream.METHODS)}")
    if given.fetch:
        print(slipstream.fetch(given.target))
    target = slipstream.load_target(given.target, given.dtype)
    answer(target, "What is gravity?")
    drafter = make_drafter(target, given.directory, given.epochs)
    measure(target, drafter, given.directory)
    if given.vllm:
        compare(target, drafter, given.vllm)


if __name__ == "__main__":
    main()
