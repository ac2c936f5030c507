"""GLIDE with a CAPE (Du et al. 2024): Tables 1–4 and Figures 1b, 4–9."""

from functools import partial
from itertools import pairwise

from slipstream.measure.papers.entry import (
    MEDUSA,
    VANILLA,
    Claim,
    Entry,
    alike,
    alpha,
    by_batch,
    by_set,
    figure,
    line,
    speed,
    tau,
)

SETS = ("gsm8k", "alpaca", "humaneval")  # the paper: GSM8K, Finance-Alpaca, Spider, Code-Python
CHAIN, CAPE, FIXED = "glide:tree=chain-5", "glide:tree=cape-5x32", "glide:tree=cape-5x32-4"
BEAM_4, BEAM_8 = "glide:tree=beam-5x4", "glide:tree=beam-5x8"
TREES = {"Medusa": MEDUSA, "GLIDE": CHAIN, "beam 4": BEAM_4, "beam 8": BEAM_8, "fixed": FIXED, "CAPE": CAPE}
DRAFT_MODEL, BLIND, MIDDLE, LOW, TWO, OWN_TEXT, READY_TEXT = (
    f"{name}:tree=chain-5"
    for name in ("distilled", "blind", "glide_middle", "glide_low", "glide_two", "glide_hard", "glide_ready")
)
WIDTHS = {width: f"glide_{width}:tree=chain-5" for width in (384, 768, 1536)}
CONFIDENT = {"GLIDE": CHAIN, "EAGLE": "eagle:tree=chain-5", "FastEagle": "fasteagle:tree=chain-3"}
DATA = "Finance-Alpaca stands for instructions and Code-Python for code; Spider is left out."
ALIKE = alike("glide")

drafting = partial(figure, "draft ms")

ENTRIES = (
    Entry(
        "glide-table-1",
        "acceptance rate and cost of GLIDE beside a draft model of its own",
        "Vicuna 7B, of GLIDE beside LLAMA-68m",
        (
            *by_set("GLIDE", CHAIN, "α", SETS),
            *by_set("draft model", DRAFT_MODEL, "α", SETS),
            *by_set("GLIDE", CHAIN, "α", SETS, T=1),
            *by_set("draft model", DRAFT_MODEL, "α", SETS, T=1),
            line("GLIDE", CHAIN, "c"),
            line("GLIDE", CHAIN, "E"),
            line("draft model", DRAFT_MODEL, "c"),
            line("draft model", DRAFT_MODEL, "E"),
        ),
        (
            Claim("GLIDE's α exceeds the draft model's", alpha(CHAIN, *SETS), alpha(DRAFT_MODEL, *SETS)),
            Claim(
                "GLIDE's α exceeds the draft model's at T = 1",
                alpha(CHAIN, *SETS, T=1),
                alpha(DRAFT_MODEL, *SETS, T=1),
            ),
            Claim(
                "GLIDE's expected speed-up exceeds the draft model's",
                figure("E", CHAIN),
                figure("E", DRAFT_MODEL),
            ),
        ),
        f"{DATA} {ALIKE} The paper's α, 0.57 to 0.69 with Vicuna 13B and 33B, is at T = 1. E is its expected "
        "speed-up, if rows cost nothing.",
    ),
    Entry(
        "glide-table-2",
        "α by whose text is learnt, and by its labels",
        "Vicuna 7B",
        (
            *by_set("the target's text", OWN_TEXT, "α", SETS, (0.650, 0.639, 0.675)),
            *by_set("ready-made text", READY_TEXT, "α", SETS, (0.648, 0.632, 0.670)),
            *by_set("the target's text and labels", CHAIN, "α", SETS),
        ),
        (
            Claim(
                "the target's text gives a larger α than ready-made text",
                alpha(OWN_TEXT, *SETS),
                alpha(READY_TEXT, *SETS),
            ),
            Claim(
                "the target's labels give a larger α than its text alone",
                alpha(CHAIN, *SETS),
                alpha(OWN_TEXT, *SETS),
            ),
        ),
        f"{DATA} {ALIKE} The paper distils by learning text that the target wrote.",
    ),
    Entry(
        "glide-table-3",
        "milliseconds of drafting: chain, beams, CAPE",
        "Vicuna 7B",
        (
            line("GLIDE", CHAIN, "draft ms", 5.3),
            line("beam 4", BEAM_4, "draft ms", 10.9),
            line("beam 8", BEAM_8, "draft ms", 14.8),
            line("CAPE", CAPE, "draft ms", 5.5),
        ),
        (
            Claim("beam 4 drafts longer than CAPE", drafting(BEAM_4), drafting(CAPE)),
            Claim("beam 8 drafts longer than beam 4", drafting(BEAM_8), drafting(BEAM_4)),
            Claim(
                "CAPE drafts less than 1.1 times as long as the chain",
                drafting(CHAIN),
                drafting(CAPE),
                times=1 / 1.1,
            ),
        ),
    ),
    Entry(
        "glide-table-4",
        "speed by the number of texts at once",
        "Vicuna 7B",
        by_batch("GLIDE", CHAIN, {1: 1.956, 2: 1.946, 4: 2.084, 8: 1.969}),
        (
            Claim(
                "the speed-up at batch 4 is within 0.2 of batch 1's",
                speed(CHAIN, batch=4),
                speed(CHAIN),
                within=0.2,
            ),
        ),
        "The paper's ratios are of its tokens/s, of copies of one prompt; here prompts differ.",
    ),
    Entry(
        "glide-figure-1b",
        "acceptance by the drafter's confidence",
        "Vicuna 7B",
        tuple(
            line(row, drafter, kind)
            for row, drafter in CONFIDENT.items()
            for kind in ("sure", "unsure", "calibration error")
        ),
        tuple(
            Claim(
                f"{row}: sure guesses are accepted more often",
                figure("sure", drafter),
                figure("unsure", drafter),
            )
            for row, drafter in CONFIDENT.items()
        ),
        "Sure: a confidence of 0.5 or more. `python benchmarks/confidence.py glide --plot` draws it.",
    ),
    Entry(
        "glide-figure-4",
        "α with and without glimpses of the target's cache",
        "Mistral 7B and Vicuna",
        (*by_set("GLIDE", CHAIN, "α", SETS), *by_set("without glimpses", BLIND, "α", SETS)),
        (Claim("glimpses give a larger α", alpha(CHAIN, *SETS), alpha(BLIND, *SETS)),),
        f"{DATA} {ALIKE} The paper's gains are 0.054 to 0.235.",
    ),
    Entry(
        "glide-figure-5",
        "tokens a second on MT-bench",
        "Vicuna 7B",
        (line("plain decoding", VANILLA, "tokens/s", 54.6), line("GLIDE", CHAIN, "tokens/s", 106.8)),
        (Claim("GLIDE is faster than plain decoding", speed(CHAIN), speed(VANILLA)),),
        "The paper's figure has bars without numbers; these are of its Table 4 at batch 1.",
    ),
    Entry(
        "glide-figure-6",
        "speed on MT-bench: Medusa, GLIDE, with beams, with CAPE",
        "Vicuna",
        tuple(line(row, drafter, kind) for kind in ("× plain", "τ") for row, drafter in TREES.items()),
        (
            Claim("CAPE is faster than GLIDE alone", speed(CAPE), speed(CHAIN)),
            Claim("CAPE is faster than beam 4", speed(CAPE), speed(BEAM_4)),
            Claim("CAPE is faster than a fixed number of candidates", speed(CAPE), speed(FIXED)),
            Claim("GLIDE alone is faster than Medusa", speed(CHAIN), speed(MEDUSA)),
            Claim("GLIDE alone is faster than with beam 4", speed(CHAIN), speed(BEAM_4)),
            Claim("CAPE commits more tokens than the chain", tau(CAPE), tau(CHAIN)),
        ),
        "The paper's figure has bars without numbers: up to 2.5 with CAPE.",
    ),
    Entry(
        "glide-figure-7",
        "α by the block whose cache is read",
        "Mistral 7B",
        (
            *by_set("the last block's", CHAIN, "α", SETS),
            *by_set("block 16's cache", MIDDLE, "α", SETS),
            *by_set("block 3's cache", LOW, "α", SETS),
        ),
        tuple(
            Claim(f"{more} cache gives a larger α than {less}", alpha(ours, *SETS), alpha(theirs, *SETS))
            for more, ours, less, theirs in (
                ("the last block's", CHAIN, "block 16's", MIDDLE),
                ("the last block's", CHAIN, "block 3's", LOW),
                ("block 16's", MIDDLE, "block 3's", LOW),
            )
        ),
        f"{DATA} {ALIKE}",
    ),
    Entry(
        "glide-figure-8",
        "one layer or two",
        "Vicuna 7B",
        tuple(
            cell
            for kind in ("× plain", "α")
            for row, drafter in (("one layer", CHAIN), ("two layers", TWO))
            for cell in by_set(row, drafter, kind, ("mt_bench",))
        ),
        (
            Claim("one layer is faster", speed(CHAIN), speed(TWO)),
            Claim("two layers give a larger α", alpha(TWO), alpha(CHAIN)),
        ),
        ALIKE,
    ),
    Entry(
        "glide-figure-9",
        "speed by the head's width",
        "Vicuna 7B",
        tuple(
            line(f"an MLP of {width}", drafter, kind)
            for width, drafter in WIDTHS.items()
            for kind in ("× plain", "α")
        ),
        tuple(
            Claim(f"{wide} is faster than {narrow}", speed(WIDTHS[wide]), speed(WIDTHS[narrow]))
            for narrow, wide in pairwise(WIDTHS)
        ),
        "The paper widens the whole layer, from 768 to 4,096. Here it is as wide as the target's states.",
    ),
)
