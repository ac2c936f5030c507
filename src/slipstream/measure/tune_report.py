"""What `tune` returns and stores, its table and its picture."""

import shlex
from typing import Any

from rich.console import Group
from rich.text import Text

from slipstream.measure.results import PARTS
from slipstream.plotting import picture
from slipstream.results import Figures, Part, Report, flat
from slipstream.spec import Named, Spec

BEST = 8  # candidates are shown


class Size(Part):
    """A node budget (root included) and a depth, with the best static tree for them and its estimated
    speed-up over plain decoding."""

    nodes: int
    depth: int
    tree: str
    estimate: float


class Proposed(Part):
    """A way to pick candidates."""

    proposal: str
    acceptance: list[list[float]]  # [d][r]: how often the r-th candidate follows an accepted node of depth d
    budgets: list[Size]  # the best static tree of each node budget


class Timing(Part):
    """Milliseconds of a round's parts, tokens per second, and the speed-up over plain decoding."""

    draft_ms: float
    verify_ms: float
    host_ms: float
    tokens_per_second: float
    speedup: float


class Candidate(Part):
    """A tree drafted along the record, or where that cannot tell, in decoding anew: the τ that it reaches,
    and the speed-up estimated from that."""

    tree: str
    proposal: str
    nodes: int
    depth: int
    tau: float
    estimate: float


class Raced(Timing, Candidate):
    """A tree, timed over `rounds` rounds. `skip`: the blocks that a self-speculative drafter skips."""

    rounds: int = 0
    skip: str | None = None


class Tuned(Part):
    """What was found at one temperature. Candidates stand best first. Those dropped from the race early were
    timed over fewer rounds, and come last."""

    temperature: float
    plain: Timing  # plain decoding's timing
    proposals: list[Proposed]
    gammas: list[Candidate] = []  # chains of a draft model; the best is a candidate
    candidates: list[Raced]
    chosen: Raced  # the first candidate whose text is plain decoding's: not a sampled one
    rungs: list[str] = []  # the best tree of each octave of nodes, among which auto chooses

    def names(self) -> dict[str, str]:
        """The candidates' trees, and their names in the table: static trees are numbered."""
        trees = dict.fromkeys(candidate.tree for candidate in self.candidates)
        static = [tree for tree in trees if tree.startswith("[")]
        return {tree: f"static {1 + static.index(tree)}" if tree in static else tree for tree in trees}

    def table(self) -> Figures:
        """The best candidates. Those dropped from the race early are dimmed, below the others."""
        title = f"T = {self.temperature:g}: plain {self.plain.tokens_per_second:.1f} tokens/s; ms of a round"
        columns = ("proposal", "nodes", "τ", *PARTS, "× plain", "rounds")
        table, names = Figures(title, "tree", *columns), self.names()
        rounds = self.chosen.rounds
        for candidate in self.candidates[:BEST]:
            if candidate.rounds < rounds:
                table.add_section()
            rounds, lost = candidate.rounds, candidate.rounds < self.chosen.rounds
            tree = (names[candidate.tree], candidate.proposal, candidate.nodes, f"{candidate.tau:.2f}")
            ms = (f"{getattr(candidate, f'{part}_ms'):.1f}" for part in PARTS)
            speedup = f"({candidate.speedup:.2f})" if lost else f"{candidate.speedup:.2f}"
            table.add_row(*tree, *ms, speedup, rounds, style="dim" if lost else None)
        return table


class Skipped(Part):
    """Blocks that a target may skip to draft for itself, and what that promises."""

    skip: str  # the blocks, as `self-speculative` takes them
    alpha: float  # agreement at T = 0
    c: float  # the cost of a pass without the blocks over that of a whole one
    expected: float  # the best speed-up of a chain if rows cost nothing


class TuneReport(Report):
    """What `tune` found.

    Attributes:
        context: number of tokens before the passes that were timed.
        batch: number of texts that shared each of these passes.
        passes_ms: milliseconds of a target pass, by its number of rows.
        draft_step_ms: milliseconds of drafting one level of depth more.
        skipping: for a self-speculative drafter, what each number of skipped blocks promises.
    """

    context: int
    batch: int = 1
    passes_ms: dict[int, float]
    draft_step_ms: float
    temperatures: list[Tuned]
    skipping: list[Skipped] = []

    def __rich__(self) -> Group:
        """The best candidates at each temperature."""
        shown: list[Figures | Text] = []
        for tuned in self.temperatures:
            shown.append(tuned.table())
            if tuned.chosen.speedup < 1:
                faster = "no tree pays here: plain decoding (--drafter vanilla) is quicker"
                shown.append(Text(faster, "yellow"))
            if tuned.candidates[0].proposal == "sampled":
                other = "proposal=sampled is quicker and as exact, but draws another text: name it to take it"
                shown.append(Text(other, "yellow"))
            if tuned.rungs:
                names = tuned.names()
                shown.append(Text(f"auto chooses among: {', '.join(names[tree] for tree in tuned.rungs)}"))
        texts = f"{self.batch} texts a round, " if self.batch > 1 else ""
        note = f"{texts}in brackets: timed over fewer rounds, as an earlier lap dropped it"
        return Group(*shown, Text(note, "dim"))

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"temperature": tuned.temperature} | flat(candidate)
            for tuned in self.temperatures
            for candidate in tuned.candidates
        ]

    def plot(self, path: str | None = None) -> Any:
        """The speed-up over plain decoding against the node budget, as predicted for optimal static trees and
        as timed: a matplotlib Figure, which a notebook shows and `path` (.svg or .png) keeps. Raises
        ValueError where it cannot be written."""
        with picture(path, len(self.temperatures)) as axes:
            for ax, tuned in zip(axes, self.temperatures, strict=True):
                predicted = {proposed.proposal: proposed.budgets for proposed in tuned.proposals}
                for name in dict.fromkeys([*predicted, *(row.proposal for row in tuned.candidates)]):
                    sizes = predicted.get(name, [])
                    nodes, estimates = [size.nodes for size in sizes], [size.estimate for size in sizes]
                    label = f"{name}, predicted" if sizes else None
                    (line,) = ax.plot(nodes, estimates, linewidth=1, label=label)
                    timed = [row for row in tuned.candidates if row.proposal == name]
                    nodes, speedups = [row.nodes for row in timed], [row.speedup for row in timed]
                    ax.scatter(nodes, speedups, s=14, color=line.get_color(), label=f"{name}, timed")
                ax.axhline(1.0, color="gray", linestyle="--", linewidth=1, label="plain")
                ax.set(xlabel="nodes", ylabel="speed-up over plain", ylim=(0, None))
                ax.set_title(f"T = {tuned.temperature:g}")
                ax.legend(frameon=False, fontsize="small")
        return axes[0].figure

    def static_trees(self, drafter: Named, best: int = BEST) -> list[str]:
        """The command-line options that name the static trees of the table, and of those that auto takes."""
        lines = []
        for tuned in self.temperatures:
            names, skip = tuned.names(), tuned.chosen.skip
            spec = Spec.parse(drafter).replace(**{"skip": skip} if skip else {})
            for place, candidate in enumerate(tuned.candidates):
                shown = place < best or candidate.tree in tuned.rungs
                if shown and (name := names[candidate.tree]) != candidate.tree:
                    called = spec.replace(tree=candidate.tree.replace(" ", ""), proposal=candidate.proposal)
                    lines.append(f"{name}, T = {tuned.temperature:g}: --drafter {shlex.quote(str(called))}")
        return lines
