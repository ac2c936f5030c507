"""The picture of docs/how.md: a question and its answer, as `slipstream demo` shows them, as an SVG.

    python benchmarks/picture.py docs/demo.svg

The run is real: plain decoding answers too, and both answers must be the same tokens.
"""

import re
from io import StringIO
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import slipstream
from common import run
from slipstream.cli import common as cli
from slipstream.files import check_writable, replacing

QUESTION = "Write a Python function called count_vowels that returns the number of vowels in a string."
DRAFTED = "bold #3fb950"


def picture(
    path: str,
    question: str = QUESTION,
    drafter: str = "hybrid:head=fasteagle",
    target: str = "smollm2",
    max_new_tokens: int = 128,
) -> None:
    """Answer the question and write the picture, in which tokens that the drafter found are green.

    Raises:
        ValueError: the drafter's answer is not plain decoding's.
    """
    loaded = slipstream.load_target(target, "float32")
    plain, answer = (
        slipstream.generate(loaded, question, name, max_new_tokens=max_new_tokens, temperature=0.0)
        for name in ("vanilla", drafter)
    )
    if answer.tokens != plain.tokens:
        raise ValueError(f"{drafter} gave another text than plain decoding: ask another question")
    kept = [1, *(each.kept for each in answer.rounds)]  # the prompt's pass yields one token
    styles = [style for n in kept for style in (*[DRAFTED] * (n - 1), "default")]
    assert loaded.text is not None
    text, shown = Text(), ""
    for count, style in enumerate(styles, 1):
        longer = loaded.text.decode(answer.tokens[:count])
        text.append(longer[len(shown) :], style)
        shown = longer
    console = Console(record=True, file=StringIO(), width=96, color_system="truecolor", highlight=False)
    console.print(Text(question, "italic"), Text(drafter, "bold"), sep="\n\n")
    console.print(text, end="\n\n")
    console.print(
        f"{len(styles)} tokens in {len(kept)} passes of the target;",
        Text(f"{len(styles) - len(kept)} tokens were drafted.", DRAFTED),
        "Plain decoding says the same.",
    )
    with replacing(path) as file:
        made = console.export_svg(title=f"slipstream, {loaded.name}", unique_id="demo")
        file.write(re.sub(r"@font-face \{.*?\}\s*", "", made, flags=re.S))  # rich's fonts come from a network


def main(
    path: Annotated[str, typer.Argument(help="the SVG to write")],
    question: Annotated[str, cli.option("the question", "TEXT")] = QUESTION,
    drafter: cli.DrafterName = "hybrid:head=fasteagle",
) -> None:
    check_writable(path)
    picture(path, question, drafter)


if __name__ == "__main__":
    run(main)
