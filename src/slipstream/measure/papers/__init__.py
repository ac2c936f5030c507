"""The papers' tables and figures, one entry each: what is measured, and which relations they show."""

from difflib import get_close_matches

from slipstream.measure.papers import bita, eagle, fasteagle, glide

ENTRIES = eagle.ENTRIES | fasteagle.ENTRIES | bita.ENTRIES | glide.ENTRIES  # by the name that users give
ANSWERS, EQUAL, READY_MADE = (
    "--data answers.jsonl.gz",
    "--recipe recipes/equal_data.yaml --data answers.jsonl.gz",
    "--recipe recipes/equal_data.yaml --data ready_made_answers.jsonl",
)
LABELS = "loss.feature=0 loss.token=1.0"  # of heads that do not learn the target's states
MLP = "head.intermediate_size=768"
GLIDE, FAST = f"{LABELS} loss.noise=0", f"{MLP} head.depth=3 loss.decay=1.111"
_ARMS = {  # method, data and options of each
    "fixed": ("eagle", READY_MADE, MLP),
    **{name: ("eagle", EQUAL, f"{MLP} head.inputs={name}") for name in eagle.INPUTS},
    "parallel": ("fasteagle", EQUAL, f"{FAST} head.cascade=false"),
    "nofeature": ("fasteagle", EQUAL, f"{FAST} loss.feature=0"),
    "masks_only": ("bita", ANSWERS, "head.prompts=0"),
    "shallow": ("bita", ANSWERS, "head.deep=false"),
    "deep": ("bita", ANSWERS, ""),
    **{f"prompts_{n}": ("bita", ANSWERS, f"head.prompts={n}") for n in bita.PROMPTS},
    "masks_6": ("bita", ANSWERS, "head.depth=6"),
    "distilled": ("draft-model", EQUAL, f"{LABELS} optimizer.lr=5e-4"),
    "blind": ("glide", EQUAL, f"{GLIDE} {MLP} head.glimpses=false"),
    "glide_low": ("glide", EQUAL, f'{GLIDE} {MLP} "head.taps=[cache of block 3]"'),
    "glide_middle": ("glide", EQUAL, f'{GLIDE} {MLP} "head.taps=[cache of block 16]"'),
    "glide_hard": ("glide", EQUAL, f"{GLIDE} {MLP} loss.hard=true"),
    "glide_ready": ("glide", READY_MADE, f"{GLIDE} {MLP} loss.hard=true"),
    "glide_two": ("glide", EQUAL, f"{GLIDE} {MLP} head.depth=2"),
    **{
        f"glide_{width}": ("glide", EQUAL, f"{GLIDE} head.intermediate_size={width}")
        for width in glide.WIDTHS
    },
}
ARMS = {  # heads that no weights ship for, and how to train them
    name: f"train {method} {data} --out runs/{name} {options}".strip()
    for name, (method, data, options) in _ARMS.items()
}


def known_name(name: str) -> str:
    """The same name. Raises ValueError, with the nearest name, where no entry has it."""
    if name in ENTRIES:
        return name
    nearest = get_close_matches(name.lower().replace("_", "-").replace(" ", "-"), ENTRIES, 1, 0.4)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"Unknown table or figure: {name!r}.{hint} `slipstream reproduce --list` shows all")
