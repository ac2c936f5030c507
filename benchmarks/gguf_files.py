r"""What a GGUF file says here and in llama.cpp: the token ids of texts, and greedy text.

    pip install llama-cpp-python
    python benchmarks/gguf_files.py gemma3-270m qwen2.5-coder-0.5b --json benchmarks/results/gguf_files.json

llama.cpp rounds what its products read to 8 bits, so greedy texts may part at a near-tie; token ids may not.
"""

from itertools import islice
from typing import Annotated, Any

import typer

from common import run
from slipstream.catalog import find_target
from slipstream.cli import common as cli
from slipstream.engine.generate import generate
from slipstream.files import check_writable, write_json
from slipstream.progress import bars
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, load_target

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n\tprint(12345.678)",
    "  Two spaces before,   three between; don't, WE'LL, it's 1,234,567 and 3.14159!\r\n\r\n\n",
    "Grüße aus Köln, 東京タワー, привет мир, שלום, नमस्ते, 한국어 123, 🙂👩‍👩‍👧 café naïve",
    "<div class='a'>&amp; x+=1; y-->0 || !z</div> https://example.org/a?b=c#d __init__ snake_case camelCase",
)


def texts_of(target: HFTarget, llama: Any, new: int) -> dict[str, Any]:
    """Both engines' token ids of each text, as a count of texts that are the same, and greedy text behind the
    first one."""
    assert target.text is not None
    ours = [target.text.ids(text, special=True) for text in TEXTS]
    theirs = [llama.tokenize(text.encode()) for text in TEXTS]
    prompt = ours[0]
    said = generate(target, prompt, max_new_tokens=new, eos_token_ids=()).tokens
    llama.reset()
    told = list(islice(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), new))
    alike = next((i for i, (one, other) in enumerate(zip(said, told, strict=True)) if one != other), new)
    return {
        "texts": len(TEXTS),
        "texts_of_the_same_ids": sum(one == other for one, other in zip(ours, theirs, strict=True)),
        "tokens": new,
        "tokens_alike": alike,
        "text": target.text.decode(said),
        "llama_cpp": target.text.decode(told),
    }


def main(
    targets: Annotated[list[str], typer.Argument(help="aliases, or GGUF files")],
    json: Annotated[str, cli.option("the result", "FILE")],
    max_new_tokens: Annotated[int, cli.option("tokens of each greedy text", "N")] = 32,
) -> None:
    """Compare and print."""
    check_writable(json)
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise ValueError("llama.cpp is not here: pip install llama-cpp-python") from error
    found: dict[str, Any] = {}
    with bars(cli.err) as progress:
        task = progress.add_task("files", total=len(targets), note="")
        for name in targets:
            if (file := find_target(name)[1]) is None:
                raise ValueError(f"{name} is no GGUF file: give one, or an alias of one")
            target = load_target(name, "float32")
            llama = Llama(str(file), n_ctx=512, verbose=False)
            found[name] = texts_of(target, llama, max_new_tokens)
            progress.update(task, advance=1, note=name)
    write_json(json, heading(target) | {"files": found})
    table = Figures("GGUF files beside llama.cpp", "file", "texts of the same ids", "tokens alike", "text")
    for name, each in found.items():
        same, alike = (
            f"{each[key]} of {each[all_]}"
            for key, all_ in (("texts_of_the_same_ids", "texts"), ("tokens_alike", "tokens"))
        )
        table.add_row(name, same, alike, each["text"])
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
