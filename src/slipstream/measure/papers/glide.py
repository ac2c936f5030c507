"""GLIDE with a CAPE (Du et al. 2024): Tables 1–4 and Figures 1b, 4–9."""

from slipstream.measure.papers.entry import (
    MEDUSA,
    VANILLA,
    Claim,
    Entry,
    alike,
    by_batch,
    by_set,
    compare,
    figure,
    line,
    speed,
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

ENTRIES = {
    "glide-table-1": Entry(
        "acceptance rate and cost of GLIDE beside a draft model of its own",
        *by_set("GLIDE", CHAIN, "α", SETS),
        *by_set("draft model", DRAFT_MODEL, "α", SETS),
        *by_set("GLIDE", CHAIN, "α", SETS, T=1.0),
        *by_set("draft model", DRAFT_MODEL, "α", SETS, T=1.0),
        line("GLIDE", CHAIN, "c"),
        line("GLIDE", CHAIN, "E"),
        line("draft model", DRAFT_MODEL, "c"),
        line("draft model", DRAFT_MODEL, "E"),
        compare("GLIDE's α exceeds the draft model's", "α", CHAIN, DRAFT_MODEL, *SETS),
        compare("GLIDE's α exceeds the draft model's at T = 1", "α", CHAIN, DRAFT_MODEL, *SETS, T=1.0),
        compare("GLIDE's expected speed-up exceeds the draft model's", "E", CHAIN, DRAFT_MODEL),
        note=f"{DATA} {ALIKE} The paper's α, 0.57 to 0.69 with Vicuna 13B and 33B, is at T = 1. E is its "
        "expected speed-up, if rows cost nothing.",
        model="Vicuna 7B, of GLIDE beside LLAMA-68m",
    ),
    "glide-table-2": Entry(
        "α by whose text is learnt, and by its labels",
        *by_set("the target's text", OWN_TEXT, "α", SETS, (0.650, 0.639, 0.675)),
        *by_set("ready-made text", READY_TEXT, "α", SETS, (0.648, 0.632, 0.670)),
        *by_set("the target's text and labels", CHAIN, "α", SETS),
        compare("the target's text gives a larger α than ready-made text", "α", OWN_TEXT, READY_TEXT, *SETS),
        compare("the target's labels give a larger α than its text alone", "α", CHAIN, OWN_TEXT, *SETS),
        note=f"{DATA} {ALIKE} The paper distils by learning text that the target wrote.",
    ),
    "glide-table-3": Entry(
        "milliseconds of drafting: chain, beams, CAPE",
        line("GLIDE", CHAIN, "draft ms", 5.3),
        line("beam 4", BEAM_4, "draft ms", 10.9),
        line("beam 8", BEAM_8, "draft ms", 14.8),
        line("CAPE", CAPE, "draft ms", 5.5),
        compare("beam 4 drafts longer than CAPE", "draft ms", BEAM_4, CAPE),
        compare("beam 8 drafts longer than beam 4", "draft ms", BEAM_8, BEAM_4),
        compare(
            "CAPE drafts less than 1.1 times as long as the chain", "draft ms", CHAIN, CAPE, times=1 / 1.1
        ),
    ),
    "glide-table-4": Entry(
        "speed by the number of texts at once",
        *by_batch("GLIDE", CHAIN, {1: 1.956, 2: 1.946, 4: 2.084, 8: 1.969}),
        Claim("the speed-up at batch 4 is within 0.2 of batch 1's", speed(CHAIN, batch=4), speed(CHAIN), 0.2),
        note="The paper's ratios are of its tokens/s, of copies of one prompt; here prompts differ.",
    ),
    "glide-figure-1b": Entry(
        "acceptance by the drafter's confidence",
        *(
            line(row, head, kind)
            for row, head in CONFIDENT.items()
            for kind in ("sure", "unsure", "calibration error")
        ),
        *(
            Claim(
                f"{row}: sure guesses are accepted more often", figure("sure", head), figure("unsure", head)
            )
            for row, head in CONFIDENT.items()
        ),
        note="Sure: a confidence of 0.5 or more. `python benchmarks/confidence.py glide --plot` draws it.",
    ),
    "glide-figure-4": Entry(
        "α with and without glimpses of the target's cache",
        *by_set("GLIDE", CHAIN, "α", SETS),
        *by_set("without glimpses", BLIND, "α", SETS),
        compare("glimpses give a larger α", "α", CHAIN, BLIND, *SETS),
        note=f"{DATA} {ALIKE} The paper's gains are 0.054 to 0.235.",
        model="Mistral 7B and Vicuna",
    ),
    "glide-figure-5": Entry(
        "tokens a second on MT-bench",
        line("plain decoding", VANILLA, "tokens/s", 54.6),
        line("GLIDE", CHAIN, "tokens/s", 106.8),
        compare("GLIDE is faster than plain decoding", "× plain", CHAIN, VANILLA),
        note="The paper's figure has bars without numbers; these are of its Table 4 at batch 1.",
    ),
    "glide-figure-6": Entry(
        "speed on MT-bench: Medusa, GLIDE, with beams, with CAPE",
        *(line(row, drafter, kind) for kind in ("× plain", "τ") for row, drafter in TREES.items()),
        compare("CAPE is faster than GLIDE alone", "× plain", CAPE, CHAIN),
        compare("CAPE is faster than beam 4", "× plain", CAPE, BEAM_4),
        compare("CAPE is faster than a fixed number of candidates", "× plain", CAPE, FIXED),
        compare("GLIDE alone is faster than Medusa", "× plain", CHAIN, MEDUSA),
        compare("GLIDE alone is faster than with beam 4", "× plain", CHAIN, BEAM_4),
        compare("CAPE commits more tokens than the chain", "τ", CAPE, CHAIN),
        note="The paper's figure has bars without numbers: up to 2.5 with CAPE.",
        model="Vicuna",
    ),
    "glide-figure-7": Entry(
        "α by the block whose cache is read",
        *by_set("the last block's", CHAIN, "α", SETS),
        *by_set("block 16's cache", MIDDLE, "α", SETS),
        *by_set("block 3's cache", LOW, "α", SETS),
        compare("the last block's cache gives a larger α than block 16's", "α", CHAIN, MIDDLE, *SETS),
        compare("the last block's cache gives a larger α than block 3's", "α", CHAIN, LOW, *SETS),
        compare("block 16's cache gives a larger α than block 3's", "α", MIDDLE, LOW, *SETS),
        note=f"{DATA} {ALIKE}",
        model="Mistral 7B",
    ),
    "glide-figure-8": Entry(
        "one layer or two",
        *by_set("one layer", CHAIN, "× plain", ["mt_bench"]),
        *by_set("two layers", TWO, "× plain", ["mt_bench"]),
        *by_set("one layer", CHAIN, "α", ["mt_bench"]),
        *by_set("two layers", TWO, "α", ["mt_bench"]),
        compare("one layer is faster", "× plain", CHAIN, TWO),
        compare("two layers give a larger α", "α", TWO, CHAIN),
        note=ALIKE,
    ),
    "glide-figure-9": Entry(
        "speed by the head's width",
        *(line(f"an MLP of {n}", head, kind) for n, head in WIDTHS.items() for kind in ("× plain", "α")),
        compare("768 is faster than 384", "× plain", WIDTHS[768], WIDTHS[384]),
        compare("1536 is faster than 768", "× plain", WIDTHS[1536], WIDTHS[768]),
        note="The paper widens the whole layer, from 768 to 4,096. Here it is as wide as the target's "
        "states.",
    ),
}
