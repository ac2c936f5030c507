"""demo: the same answers twice, and what the drafter saved."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from slipstream.engine.costs import explained
from slipstream.measure.bench_report import promise
from slipstream.measure.metrics import Answered, Tally
from slipstream.measure.questions import Question
from slipstream.measure.runner import HF, Contest, first_prompts
from slipstream.targets.prompts import encode

ACCEPTED, OWN = "bold green", "default"
SHOWN = {"vanilla": "plain", HF: "HF generate"}
GREEN = "  (green: drafted, and accepted by the target)"


def demo(contest: Contest, drafter: str, questions: Sequence[Question], console: Console) -> None:
    """Answer each question plainly, with Hugging Face `generate` (timed, not shown) and with the drafter;
    compare."""
    totals: dict[str, list[Answered]] = {method: [] for method in contest.methods}
    legend = GREEN if console.color_system and not console.no_color else ""
    with console.status("warming up"):
        contest.warm_up(first_prompts(contest.target, questions, contest.max_new_tokens)[0])
    try:
        for number, question in enumerate(questions, 1):
            console.rule(Text(f"{number} of {len(questions)}: {question.category}"), align="left")
            answers = _answered(contest, drafter, question, console, legend)
            for method, answer in answers.items():
                totals[method].append(answer)
            console.print(
                _figures({method: [answer] for method, answer in answers.items()}, drafter), end="\n\n"
            )
    finally:
        if totals[drafter]:
            console.rule("all answers", align="left")
            console.print(_figures(totals, drafter))
            if contest.drafters[drafter].candidate_trees:
                console.print()
                console.print(explained(contest.target, contest.drafters[drafter]))


def _answered(
    contest: Contest, drafter: str, question: Question, console: Console, legend: str
) -> dict[str, Answered]:
    """One question, asked and answered on the screen."""
    answers: dict[str, Answered] = {}
    prompt = encode(contest.target, question.turns[0])
    console.print(Text(question.turns[0], "italic dim"))
    for method in ("vanilla", HF, drafter):
        if method == HF:
            with console.status("Hugging Face generate"):
                answers[method] = contest.ask(method, prompt)
        else:
            shown = SHOWN.get(method, method)
            console.print(Text.assemble("\n", (shown, "bold"), "" if method == "vanilla" else legend))
            answers[method] = contest.ask(method, prompt, lambda texts: _paint(texts, console))
            console.print("\n")
    console.print(_verdict(contest, drafter, question, prompt, answers["vanilla"], answers[drafter]))
    return answers


def _paint(texts: list[str], console: Console) -> None:
    """Print what a round brought, in green what was drafted: all but its last token. A part of a long prompt
    brings nothing."""
    drafted = Text("".join(texts[:-1]), ACCEPTED)
    console.print(drafted + Text("".join(texts[-1:]), OWN), end="", soft_wrap=True)


def _verdict(
    contest: Contest,
    drafter: str,
    question: Question,
    prompt: list[int],
    plain: Answered,
    drafted: Answered,
) -> Text:
    if drafted.tokens == plain.tokens:
        strict = contest.promises_bits(drafter)
        return Text("the same text, token for token" if strict else "the same text", "green")
    if not contest.keeps_text(drafter):
        return Text("another draw from the same distribution", "cyan")
    audited = contest.audited(drafter, drafted, plain, question, prompt)
    first, margin = audited.differences[0], max(each.margin for each in audited.differences)
    size = f"token {first.position}, margin {margin:.2g} in logits"
    if not audited.unexplained:
        return Text(f"rounding turned a near-tie ({size})", "yellow")
    held = promise(contest.exactness, contest.target.margin)
    return Text(f"NOT the same text {held}: {size}. Please report this", "bold red")


def _figures(answers: dict[str, list[Answered]], drafter: str) -> Text:
    tallies = {method: Tally(each.counted for each in some) for method, some in answers.items()}
    speed = {method: tally.tokens_per_second for method, tally in tallies.items()}
    ours = speed[drafter]
    ratios = (f"{ours / speed[base]:.2f}× {name} ({speed[base]:.1f})" for base, name in SHOWN.items())
    figures = f"τ {tallies[drafter].tau:.2f}   {ours:.1f} tokens/s   "
    return Text.assemble((figures, "bold"), "   ".join(ratios))
