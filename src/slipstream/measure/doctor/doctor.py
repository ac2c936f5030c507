"""doctor: why drafting is slow or guesses badly. Each fault is named by a measurement that shows it.

A check measures something that only its fault spoils, and wherever it can it measures the remedy, too.
"""

from collections.abc import Callable
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from slipstream.core.sampling import Sampling
from slipstream.files import check_counts, check_limits, evenly
from slipstream.measure.datasets import Questions, load_questions
from slipstream.measure.doctor import head_checks, machine_checks
from slipstream.measure.doctor.diagnosis import Diagnosis, Outcome, Unmeasured
from slipstream.measure.runner import first_prompts
from slipstream.provenance import public
from slipstream.results import Figures, Part, Report, flat, heading
from slipstream.spec import Named, Spec
from slipstream.targets.load import AnyTarget, loaded

QUESTIONS = 8
VERDICTS = {"found": ("FOUND", "bold red"), "ok": ("ok", "green"), "not measured": ("–", "dim")}
STEPS = 40  # of a progress bar, about: checks, and changes that are tried
CHECKS: dict[str, Callable[[Diagnosis], Outcome]] = {  # by the fault that each finds
    "wrong chat template": head_checks.template,
    "missing system prompt": head_checks.system,
    "tap shifted by one block": head_checks.tap,
    "final norm missing": head_checks.norm,
    "another target's drafter": head_checks.renamed,
    "draft vocabulary of other texts": head_checks.vocabulary,
    "rope base wrong": head_checks.rope,
    "loss mask off by one": head_checks.mask,
    "context past training length": head_checks.context,
    "temperature above training": head_checks.temperature,
    "depth too small": machine_checks.shallow,
    "tree too large": machine_checks.oversized,
    "batch past break-even": machine_checks.crowded,
    "uncompiled": machine_checks.uncompiled,
    "precision too wide": machine_checks.precision,
    "threads": machine_checks.threads,
}


class Finding(Part):
    """What the check of a fault found. One that does not apply says why in `measured`."""

    fault: str
    verdict: Literal["ok", "found", "not measured"]
    measured: str
    normal: str = ""
    cause: str = ""
    remedy: str = ""
    figures: dict[str, float] = {}

    @classmethod
    def of(cls, fault: str, diagnosis: Diagnosis) -> "Finding":
        """Run the check of a fault."""
        try:
            outcome = CHECKS[fault](diagnosis)
        except Unmeasured as error:
            return cls(fault=fault, verdict="not measured", measured=str(error))
        fields = outcome._asdict()
        fields["figures"] = {name: round(float(value), 5) for name, value in outcome.figures.items()}
        if fields.pop("found"):
            return cls(fault=fault, verdict="found", **fields)
        return cls(fault=fault, verdict="ok", **fields | {"cause": "", "remedy": ""})


class DoctorReport(Report):
    """What `doctor` found.

    Attributes:
        temperature, batch: those of the use that was examined.
        context: number of tokens of its texts. None: as many as the questions have.
    """

    drafter: str
    temperature: float
    batch: int
    context: int | None = None
    findings: list[Finding]

    @property
    def found(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.verdict == "found"]

    def __rich__(self) -> Group:
        """A row for every check, and what to do about each fault."""
        how = f"{self.dtype}{', compiled' * self.compiled}, T = {self.temperature:g}, {self.batch} at once"
        table = Figures(f"{self.target}, {self.drafter}: {how}", "fault", "measured", "normal", "verdict")
        for column in table.columns[1:]:
            column.justify = "left"
        for finding in self.findings:
            verdict = Text(*VERDICTS[finding.verdict])
            table.add_row(finding.fault, finding.measured, finding.normal, verdict)
        lines = [Text("nothing found", "green")] if not self.found else []
        for finding in self.found:
            lines.append(Text.assemble((f"{finding.fault}: ", "bold red"), finding.cause))
            lines.append(Text.assemble(("  remedy: ", "bold"), finding.remedy))
        return Group(table, *lines)

    def _rows(self) -> list[dict[str, Any]]:
        return [flat(finding) for finding in self.findings]


@public
def doctor(
    target: AnyTarget,
    drafter: Named = "auto",
    questions: Questions = (),
    *,
    temperature: float = 0.0,
    batch: int = 1,
    context: int | None = None,
    limit: int = QUESTIONS,
    max_new_tokens: int = 32,
    progress: Callable[[str], None] = lambda _: None,
) -> DoctorReport:
    """Look for what makes drafting slow, or guesses bad, and say what to do about it.

    Args:
        target, questions, progress: as `bench` takes them.
        drafter: a name or a directory, with options.
        temperature: the temperature of the answers in use.
        batch: how many of them are made at once.
        context: number of tokens of the texts in use; default: as many as the questions have.
        limit: number of questions that are asked in all.
        max_new_tokens: tokens of each answer that is examined, at most.

    Raises:
        ValueError: an unknown drafter, a setting out of range, a question that leaves no room for an answer,
            or a target without a tokenizer.
    """
    chosen = evenly(load_questions(questions), limit)
    check_counts(batch=batch, max_new_tokens=max_new_tokens)
    check_limits(context=context)
    Sampling(temperature=temperature)
    target = loaded(target)
    first_prompts(target, chosen, max_new_tokens)
    if context is not None and context + max_new_tokens >= target.window:
        raise ValueError(f"context is {context:,}; with an answer it must fit {target.window:,} tokens")
    use = temperature, batch, context, max_new_tokens
    diagnosis = Diagnosis(target, Spec.parse(drafter), chosen, *use, progress)
    diagnosis.drafter  # noqa: B018  an unknown one is refused before anything is measured
    findings = []
    for fault in CHECKS:
        progress(fault)
        findings.append(Finding.of(fault, diagnosis))
    return DoctorReport(
        **heading(target),
        drafter=str(diagnosis.spec),
        temperature=temperature,
        batch=batch,
        context=context,
        findings=findings,
    )
