"""GLIDE with a CAPE (Du et al. 2024): Tables 1–4 and Figures 1b, 4–9."""

from itertools import pairwise

from slipstream.measure.papers.entry import VANILLA, Entry, Figure, Line, alike, by_set, drawn, near, over

MT = ("mt_bench",)
SETS = ("gsm8k", "alpaca", "humaneval")  # the paper: GSM8K, Finance-Alpaca, Spider, Code-Python
CHAIN, CAPE, FIXED = "glide:tree=chain-5", "glide:tree=cape-5x32", "glide:tree=cape-5x32-4"
BEAMS = {"beam 4": "glide:tree=beam-5x4", "beam 8": "glide:tree=beam-5x8"}
MEDUSA = "medusa:tree=best-first-3x16"
TREES = {"Medusa": MEDUSA, "GLIDE": CHAIN, **BEAMS, "fixed": FIXED, "CAPE": CAPE}
DATA = "Finance-Alpaca stands for instructions and Code-Python for code; Spider is left out."
ALIKE = alike("glide")
CONFIDENT = {"GLIDE": CHAIN, "EAGLE": "eagle:tree=chain-5", "FastEagle": "fasteagle:tree=chain-3"}
ARMS = {  # name: what it is
    "blind": "without glimpses",
    "glide_low": "block 3's cache",
    "glide_middle": "block 16's cache",
    "glide_two": "two layers",
}
LOWER = ("glide_middle", "glide_low")
WIDTHS = {width: f"glide_{width}:tree=chain-5" for width in (384, 768, 1536)}


def _alpha(drafter: str, temperature: float = 0.0) -> Figure:
    return Figure(drafter, SETS, "α", temperature)


def _arm(name: str) -> str:
    return f"{name}:tree=chain-5"


DRAFTERS = {"GLIDE": CHAIN, "draft model": _arm("distilled")}
OWN, READY = _arm("glide_hard"), _arm("glide_ready")


def _speed(drafter: str, batch: int = 1) -> Figure:
    return Figure(drafter, MT, "× plain", 0.0, batch)


def _drafting(drafter: str) -> Figure:
    return Figure(drafter, MT, "draft ms")


ENTRIES = (
    Entry(
        "glide-table-1",
        "acceptance rate and cost of GLIDE beside a draft model of its own",
        "Vicuna 7B, of GLIDE beside LLAMA-68m",
        (
            *by_set(DRAFTERS, SETS, "α", {}),
            *by_set(DRAFTERS, SETS, "α", {}, 1.0),
            *(
                Line(row, kind, Figure(each, MT, kind))
                for row, each in DRAFTERS.items()
                for kind in ("c", "E")
            ),
        ),
        (
            over("GLIDE's α exceeds the draft model's", _alpha(CHAIN), _alpha(DRAFTERS["draft model"])),
            over(
                "GLIDE's α exceeds the draft model's at T = 1",
                _alpha(drawn(CHAIN, 1.0), 1.0),
                _alpha(drawn(DRAFTERS["draft model"], 1.0), 1.0),
            ),
            over(
                "GLIDE's expected speed-up exceeds the draft model's",
                Figure(CHAIN, MT, "E"),
                Figure(DRAFTERS["draft model"], MT, "E"),
            ),
        ),
        f"{DATA} {ALIKE} The paper's α, 0.57 to 0.69 with Vicuna 13B and 33B, is at T = 1. E is its expected "
        "speed-up, if rows cost nothing.",
    ),
    Entry(
        "glide-table-2",
        "α by whose text is learnt, and by its labels",
        "Vicuna 7B",
        by_set(
            {"the target's text": OWN, "ready-made text": READY, "the target's text and labels": CHAIN},
            SETS,
            "α",
            {"the target's text": (0.650, 0.639, 0.675), "ready-made text": (0.648, 0.632, 0.670)},
        ),
        (
            over("the target's text gives a larger α than ready-made text", _alpha(OWN), _alpha(READY)),
            over("the target's labels give a larger α than its text alone", _alpha(CHAIN), _alpha(OWN)),
        ),
        f"{DATA} {ALIKE} The paper distils by learning text that the target wrote.",
    ),
    Entry(
        "glide-table-3",
        "milliseconds of drafting: chain, beams, CAPE",
        "Vicuna 7B",
        tuple(
            Line(row, "draft ms", _drafting(drafter), paper)
            for row, drafter, paper in (
                ("GLIDE", CHAIN, 5.3),
                ("beam 4", BEAMS["beam 4"], 10.9),
                ("beam 8", BEAMS["beam 8"], 14.8),
                ("CAPE", CAPE, 5.5),
            )
        ),
        (
            over("beam 4 drafts longer than CAPE", _drafting(BEAMS["beam 4"]), _drafting(CAPE)),
            over("beam 8 drafts longer than beam 4", _drafting(BEAMS["beam 8"]), _drafting(BEAMS["beam 4"])),
            over(
                "CAPE drafts less than 1.1 times as long as the chain",
                Figure(CHAIN, MT, "draft ms"),
                _drafting(CAPE),
                1 / 1.1,
            ),
        ),
    ),
    Entry(
        "glide-table-4",
        "speed by the number of texts at once",
        "Vicuna 7B",
        tuple(
            Line("GLIDE", f"batch {batch}", _speed(CHAIN, batch), paper)
            for batch, paper in ((1, 1.956), (2, 1.946), (4, 2.084), (8, 1.969))
        ),
        (near("the speed-up at batch 4 is within 0.2 of batch 1's", _speed(CHAIN, 4), _speed(CHAIN), 0.2),),
        "The paper's ratios are of its tokens/s, of copies of one prompt; here prompts differ.",
    ),
    Entry(
        "glide-figure-1b",
        "acceptance by the drafter's confidence",
        "Vicuna 7B",
        tuple(
            Line(row, kind, Figure(drafter, MT, kind))
            for row, drafter in CONFIDENT.items()
            for kind in ("sure", "unsure", "calibration error")
        ),
        tuple(
            over(
                f"{row}: sure guesses are accepted more often",
                Figure(drafter, MT, "sure"),
                Figure(drafter, MT, "unsure"),
            )
            for row, drafter in CONFIDENT.items()
        ),
        "Sure: a confidence of 0.5 or more. `python benchmarks/confidence.py glide --plot` draws it.",
    ),
    Entry(
        "glide-figure-4",
        "α with and without glimpses of the target's cache",
        "Mistral 7B and Vicuna",
        by_set({"GLIDE": CHAIN, ARMS["blind"]: _arm("blind")}, SETS, "α", {}),
        (over("glimpses give a larger α", _alpha(CHAIN), _alpha(_arm("blind"))),),
        f"{DATA} {ALIKE} The paper's gains are 0.054 to 0.235.",
    ),
    Entry(
        "glide-figure-5",
        "tokens a second on MT-bench",
        "Vicuna 7B",
        (
            Line("plain decoding", "tokens/s", Figure(VANILLA, MT, "tokens/s"), 54.6),
            Line("GLIDE", "tokens/s", Figure(CHAIN, MT, "tokens/s"), 106.8),
        ),
        (over("GLIDE is faster than plain decoding", _speed(CHAIN), _speed(VANILLA)),),
        "The paper's figure has bars without numbers; these are of its Table 4 at batch 1.",
    ),
    Entry(
        "glide-figure-6",
        "speed on MT-bench: Medusa, GLIDE, with beams, with CAPE",
        "Vicuna",
        (
            *(Line(row, "× plain", _speed(drafter)) for row, drafter in TREES.items()),
            *(Line(row, "τ", Figure(drafter, MT)) for row, drafter in TREES.items()),
        ),
        (
            over("CAPE is faster than GLIDE alone", _speed(CAPE), _speed(CHAIN)),
            over("CAPE is faster than beam 4", _speed(CAPE), _speed(BEAMS["beam 4"])),
            over("CAPE is faster than a fixed number of candidates", _speed(CAPE), _speed(FIXED)),
            over("GLIDE alone is faster than Medusa", _speed(CHAIN), _speed(MEDUSA)),
            over("GLIDE alone is faster than with beam 4", _speed(CHAIN), _speed(BEAMS["beam 4"])),
            over("CAPE commits more tokens than the chain", Figure(CAPE, MT), Figure(CHAIN, MT)),
        ),
        "The paper's figure has bars without numbers: up to 2.5 with CAPE.",
    ),
    Entry(
        "glide-figure-7",
        "α by the block whose cache is read",
        "Mistral 7B",
        by_set({"the last block's": CHAIN} | {ARMS[name]: _arm(name) for name in LOWER}, SETS, "α", {}),
        (
            over(
                "the last block's cache gives a larger α than block 16's",
                _alpha(CHAIN),
                _alpha(_arm(LOWER[0])),
            ),
            over(
                "the last block's cache gives a larger α than block 3's",
                _alpha(CHAIN),
                _alpha(_arm(LOWER[1])),
            ),
            over(
                "block 16's cache gives a larger α than block 3's",
                _alpha(_arm(LOWER[0])),
                _alpha(_arm(LOWER[1])),
            ),
        ),
        f"{DATA} {ALIKE}",
    ),
    Entry(
        "glide-figure-8",
        "one layer or two",
        "Vicuna 7B",
        (
            *by_set({"one layer": CHAIN, ARMS["glide_two"]: _arm("glide_two")}, MT, "× plain", {}),
            *by_set({"one layer": CHAIN, ARMS["glide_two"]: _arm("glide_two")}, MT, "α", {}),
        ),
        (
            over("one layer is faster", _speed(CHAIN), _speed(_arm("glide_two"))),
            over("two layers give a larger α", Figure(_arm("glide_two"), MT, "α"), Figure(CHAIN, MT, "α")),
        ),
        ALIKE,
    ),
    Entry(
        "glide-figure-9",
        "speed by the head's width",
        "Vicuna 7B",
        tuple(
            Line(f"an MLP of {width}", kind, Figure(head, MT, kind))
            for width, head in WIDTHS.items()
            for kind in ("× plain", "α")
        ),
        tuple(
            over(f"{wide} is faster than {narrow}", _speed(WIDTHS[wide]), _speed(WIDTHS[narrow]))
            for narrow, wide in pairwise(WIDTHS)
        ),
        "The paper widens the whole layer, from 768 to 4,096. Here it is as wide as the target's states.",
    ),
)
