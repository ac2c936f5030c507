"""The papers' tables and figures, one entry each: what is measured, and which relations they show."""

from difflib import get_close_matches

from slipstream.measure.papers import bita, eagle, fasteagle, glide
from slipstream.measure.papers.entry import Entry

ENTRIES: dict[str, Entry] = {
    entry.name: entry for paper in (eagle, fasteagle, bita, glide) for entry in paper.ENTRIES
}
EQUAL = "--recipe recipes/equal_data.yaml --data answers.jsonl.gz"
LABELS = "loss.feature=0 loss.token=1.0"  # of heads that do not say the target's states
MLP = "head.intermediate_size=768"
GLIDE, FAST = f"{LABELS} loss.noise=0", f"{MLP} head.depth=3 loss.decay=1.111"
ARMS = {  # heads that no weights ship for, and how to train them
    "fixed": "train eagle --recipe recipes/equal_data.yaml --data ready_made_answers.jsonl "
    f"--out runs/fixed {MLP}",
    **{
        inputs: f"train eagle {EQUAL} --out runs/{inputs} {MLP} head.inputs={inputs}"
        for inputs in eagle.OTHERS
    },
    "parallel": f"train fasteagle {EQUAL} --out runs/parallel {FAST} head.cascade=false",
    "nofeature": f"train fasteagle {EQUAL} --out runs/nofeature {FAST} loss.feature=0",
    "masks_only": "train bita --data answers.jsonl.gz --out runs/masks_only head.prompts=0",
    "shallow": "train bita --data answers.jsonl.gz --out runs/shallow head.deep=false",
    "deep": "train bita --data answers.jsonl.gz --out runs/deep",
    **{
        f"prompts_{count}": f"train bita --data answers.jsonl.gz --out runs/prompts_{count} "
        f"head.prompts={count}"
        for count in bita.PROMPTS
    },
    "masks_6": "train bita --data answers.jsonl.gz --out runs/masks_6 head.depth=6",
    "distilled": f"train draft-model {EQUAL} --out runs/distilled {LABELS} optimizer.lr=5e-4",
    "blind": f"train glide {EQUAL} --out runs/blind {GLIDE} {MLP} head.glimpses=false",
    **{
        name: f'train glide {EQUAL} --out runs/{name} {GLIDE} {MLP} "head.taps=[cache of block {block}]"'
        for name, block in {"glide_low": 3, "glide_middle": 16}.items()
    },
    "glide_hard": f"train glide {EQUAL} --out runs/glide_hard {GLIDE} {MLP} loss.hard=true",
    "glide_ready": "train glide --recipe recipes/equal_data.yaml --data ready_made_answers.jsonl "
    f"--out runs/glide_ready {GLIDE} {MLP} loss.hard=true",
    "glide_two": f"train glide {EQUAL} --out runs/glide_two {GLIDE} {MLP} head.depth=2",
    **{
        f"glide_{width}": f"train glide {EQUAL} --out runs/glide_{width} {GLIDE} "
        f"head.intermediate_size={width}"
        for width in glide.WIDTHS
    },
}


def entry_of(name: str) -> Entry:
    """The entry of this name. Raises ValueError, with the nearest name, where there is none."""
    if name in ENTRIES:
        return ENTRIES[name]
    near = get_close_matches(name.lower().replace("_", "-").replace(" ", "-"), ENTRIES, 1, 0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown table or figure: {name!r}.{hint} `slipstream reproduce --list` shows all")
