"""BiTA (Lin et al. 2024): Figures 1, 7, 8, 9 and Tables 1–4, 7–9."""

from itertools import chain

from slipstream.measure.papers.entry import (
    MEDUSA,
    SMALL,
    VANILLA,
    Claim,
    Entry,
    Figure,
    Line,
    by_set,
    compare,
    figure,
    line,
    speed,
    tau,
)

EFFICIENT, CHAIN = "bita:tree=backbone-3x5,hosts=4", "bita:tree=chain-3,hosts=1"
FULL = {
    "fully tree-based, k = 1": "bita:tree=chain-3,hosts=4",
    "fully tree-based, k = 2": "bita:tree=full-3x2,hosts=4",
    "fully tree-based, k = 3": "bita:tree=full-3x3,hosts=4",
}
METHODS = {"straightforward": CHAIN, **FULL, "efficient tree": EFFICIENT}
DESIGNS = {"mask tokens only": "masks_only:tree=chain-3", "shallow prompts": "shallow:tree=chain-3"}
DEEP = "deep:tree=chain-3"
PROMPTS = {count: f"prompts_{count}:tree=chain-3" for count in (4, 16, 64)}
MASKS = {count: f"masks_6:tree=chain-{count},hosts=1" for count in range(2, 7)}
SETS = ("xsum", "mt_bench", "cip", "humaneval")
CATEGORIES = {"coding": 2.68, "extraction": 2.94, "humanities": 2.21, "math": 2.69, "reasoning": 2.33,
              "roleplay": 2.11, "stem": 2.37, "writing": 2.26}  # fmt: skip
HOSTS = "Four hosts carry masks; at hosts=0 every node does, as in the paper."


def _on(category: str) -> Figure:
    return speed(EFFICIENT, f"mt_bench/{category}")


Sets = tuple[str, str]
Speeds = list[tuple[float, float]]  # the paper's, by drafter and set


def _compared(drafters: dict[str, str], sets: Sets, paper: Speeds) -> tuple[Line, ...]:
    speeds = [
        by_set(row, drafter, "× plain", sets, figures)
        for (row, drafter), figures in zip(drafters.items(), paper, strict=True)
    ]
    return tuple(chain(*speeds, *(by_set(row, drafter, "τ", sets) for row, drafter in drafters.items())))


def _decoding(sets: Sets, paper: Speeds) -> Entry:
    slower = {"straightforward decoding": CHAIN, **FULL}
    return Entry(
        f"decoding methods on {' and '.join(sets)}",
        *_compared(METHODS, sets, paper),
        *(
            compare(f"the efficient tree is faster than {method}", "× plain", EFFICIENT, drafter, *sets)
            for method, drafter in slower.items()
        ),
        compare(
            "the efficient tree commits more tokens than straightforward decoding",
            "τ",
            EFFICIENT,
            CHAIN,
            *sets,
        ),
        note=HOSTS,
        model="LLaMA-2-7B",
    )


def _designs(sets: Sets, paper: Speeds) -> Entry:
    return Entry(
        f"prompting designs on {' and '.join(sets)}",
        *_compared({**DESIGNS, "bi-directional tuning": DEEP}, sets, paper),
        *(
            compare(f"deep prompts commit more tokens than {row}", "τ", DEEP, drafter, *sets)
            for row, drafter in DESIGNS.items()
        ),
        model="LLaMA-2-7B",
    )


ENTRIES = {
    "bita-figure-1": Entry(
        "speed on MT-bench over plain decoding",
        line("BiTA", EFFICIENT, "× plain", 2.35),
        line("BiTA", EFFICIENT, "τ"),
        compare("BiTA is faster than plain decoding", "× plain", EFFICIENT, VANILLA),
        note=HOSTS,
    ),
    "bita-figure-7": Entry(
        "BiTA beside Medusa on MT-bench",
        line("BiTA", EFFICIENT, "× plain", 2.35),
        line("Medusa", MEDUSA, "× plain", 1.97),
        line("BiTA", EFFICIENT, "τ"),
        line("Medusa", MEDUSA, "τ"),
        compare("BiTA is 1.19 times as fast as Medusa or more", "× plain", EFFICIENT, MEDUSA, times=1.19),
        note=HOSTS,
    ),
    "bita-figure-8": Entry(
        "speed by the number of prompt tokens",
        *(line(f"{n} prompts", head, kind) for n, head in PROMPTS.items() for kind in ("× plain", "τ")),
        compare("16 prompts are faster than 4", "× plain", PROMPTS[16], PROMPTS[4]),
        compare("64 prompts are as fast as 16, to 0.1", "× plain", PROMPTS[64], PROMPTS[16], within=0.1),
        model="LLaMA-2-7B",
    ),
    "bita-figure-9": Entry(
        "speed by the number of mask tokens",
        Line("first masks of the head", "2 masks", tau("bita:tree=chain-2,hosts=1")),
        Line("first masks of the head", "3 masks", tau(CHAIN)),
        *(
            Line(f"of a head of six, {kind}", f"{count} masks", figure(kind, drafter))
            for kind in ("× plain", "τ")
            for count, drafter in MASKS.items()
        ),
        compare("three masks commit more tokens than two", "τ", CHAIN, "bita:tree=chain-2,hosts=1"),
        compare("three masks are faster than six", "× plain", MASKS[3], MASKS[6]),
        note="The paper trains an arm for each number; here the first masks of one head draft.",
        model="LLaMA-2-7B",
    ),
    "bita-table-1": Entry(
        "speed on summaries, MT-bench, conversation and code",
        *by_set("BiTA", EFFICIENT, "× plain", SETS, (2.19, 2.38, 2.29, 2.73)),
        *by_set("BiTA", EFFICIENT, "τ", SETS),
        *(
            Claim(f"code gains more than {name}", speed(EFFICIENT, "humaneval"), speed(EFFICIENT, name))
            for name in SETS[:3]
        ),
        note=HOSTS,
        model="LLaMA-2-7B",
    ),
    "bita-table-2": Entry(
        "BiTA beside methods of speculative decoding on MT-bench",
        line("Lookahead", "lookahead", "× plain", 1.70),
        line("self-speculative", "self-speculative", "× plain"),
        line("draft model", SMALL, "× plain"),
        line("BiTA", EFFICIENT, "× plain", 2.38),
        compare("BiTA is faster than Lookahead", "× plain", EFFICIENT, "lookahead"),
        compare("BiTA is faster than self-speculation", "× plain", EFFICIENT, "self-speculative"),
        note="Self-speculation: `slipstream tune --drafter self-speculative` finds the blocks to skip first.",
        model="LLaMA-2-7B",
    ),
    "bita-table-3": _designs(("cip", "humaneval"), [(1.94, 2.12), (2.01, 2.31), (2.29, 2.73)]),
    "bita-table-4": _decoding(
        ("xsum", "mt_bench"),
        [(1.63, 1.82), (1.81, 2.04), (2.02, 2.23), (1.97, 2.05), (2.19, 2.38)],
    ),
    "bita-table-7": Entry(
        "speed by category of MT-bench",
        *(Line("BiTA", category, _on(category), paper) for category, paper in CATEGORIES.items()),
        Claim("coding gains more than roleplay", _on("coding"), _on("roleplay")),
        Claim("extraction gains more than writing", _on("extraction"), _on("writing")),
        note="The first turns of MT-bench: a larger --limit gives each category more of them.",
        model="LLaMA-2-7B",
    ),
    "bita-table-8": _designs(("xsum", "mt_bench"), [(1.95, 2.00), (2.03, 2.06), (2.19, 2.38)]),
    "bita-table-9": _decoding(
        ("cip", "humaneval"),
        [(1.89, 2.06), (2.02, 2.39), (2.14, 2.58), (1.93, 2.29), (2.29, 2.73)],
    ),
}
