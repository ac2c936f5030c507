"""demo: the same answers twice, and what the drafter saved."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from slipstream.engine.costs import explained
from slipstream.measure.datasets import Question
from slipstream.measure.metrics import Answered, Tally
from slipstream.measure.results import HF, promise
from slipstream.measure.runner import Runner, first_prompts
from slipstream.targets.prompts import encode

SHOWN = {"vanilla": "plain", HF: "HF generate"}
GREEN = "  (green: drafted, and accepted by the target)"


def demo(runner: Runner, drafter: str, questions: Sequence[Question], console: Console) -> None:
    """Answer each question plainly, with Hugging Face `generate` (timed, not shown) and with the drafter;
    compare."""
    totals: dict[str, list[Answered]] = {method: [] for method in ("vanilla", HF, drafter)}
    with console.status("warming up"):
        runner.warm_up(first_prompts(runner.target, questions, runner.max_new_tokens)[0])
    try:
        for number, question in enumerate(questions, 1):
            console.rule(Text(f"{number} of {len(questions)}: {question.category}"), align="left")
            answers = _answered(runner, drafter, question, console)
            for method, answer in answers.items():
                totals[method].append(answer)
            own = {method: [answer] for method, answer in answers.items()}
            console.print(_figures(own, drafter), end="\n\n")
    finally:
        if totals[drafter]:
            console.rule("all answers", align="left")
            console.print(_figures(totals, drafter))
            if runner.drafters[drafter].candidate_trees:
                console.print()
                console.print(explained(runner.target, runner.drafters[drafter]))


def _answered(runner: Runner, drafter: str, question: Question, console: Console) -> dict[str, Answered]:
    """One question, asked and answered on the screen."""

    def paint(texts: list[str]) -> None:
        """What a round brought, in green what was drafted: all but its last token. A part of a long prompt
        brings nothing."""
        drafted = Text("".join(texts[:-1]), "bold green")
        console.print(drafted + Text("".join(texts[-1:]), "default"), end="", soft_wrap=True)

    answers: dict[str, Answered] = {}
    legend = GREEN if console.color_system and not console.no_color else ""
    prompt = encode(runner.target, question.turns[0])
    console.print(Text(question.turns[0], "italic dim"))
    for method in ("vanilla", HF, drafter):
        if method == HF:
            with console.status("Hugging Face generate"):
                answers[method] = runner.ask(method, prompt)
        else:
            name = (SHOWN.get(method, method), "bold")
            console.print(Text.assemble("\n", name, "" if method == "vanilla" else legend))
            answers[method] = runner.ask(method, prompt, paint)
            console.print("\n")
    plain, drafted = answers["vanilla"], answers[drafter]
    if runner.keeps_text(drafter):
        drafted = runner.audited(drafter, drafted, plain, question, prompt)
    console.print(_verdict(runner, drafter, drafted, drafted.tokens == plain.tokens))
    return answers


def _verdict(runner: Runner, drafter: str, answer: Answered, same: bool) -> Text:
    if same:
        strict = runner.promises_bits(drafter)
        return Text("the same text, token for token" if strict else "the same text", "green")
    if not answer.differences:
        return Text("another draw from the same distribution", "cyan")
    first, margin = answer.differences[0], max(one.margin for one in answer.differences)
    size = f"token {first.position}, margin {margin:.2g} in logits"
    if not answer.unexplained:
        return Text(f"rounding turned a near-tie ({size})", "yellow")
    held = promise(runner.exactness, runner.target.margin)
    return Text(f"NOT the same text {held}: {size}. Please report this", "bold red")


def _figures(answers: dict[str, list[Answered]], drafter: str) -> Text:
    tallies = {method: Tally(answer.counted for answer in some) for method, some in answers.items()}
    speed = {method: tally.tokens_per_second for method, tally in tallies.items()}
    ours = speed[drafter]
    ratios = (f"{ours / speed[base]:.2f}× {name} ({speed[base]:.1f})" for base, name in SHOWN.items())
    figures = f"τ {tallies[drafter].tau:.2f}   {ours:.1f} tokens/s   "
    return Text.assemble((figures, "bold"), "   ".join(ratios))
