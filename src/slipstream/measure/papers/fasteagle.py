"""FastEagle (2025): Tables 1–3 and Figure 3."""

from slipstream.measure.papers.entry import VANILLA, Entry, Figure, Line, alike, by_set, drawn, near, over

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
TREE, BACKBONE = "best-first-3x16", "backbone-3x10"
FAST, EAGLE_3, MEDUSA = (f"{name}:tree={TREE}" for name in ("fasteagle", "eagle3", "medusa"))
SMALL = "draft-model:tree=chain-5"
CHAIN = "fasteagle:tree=chain-3"
FAST_BACKBONE, EAGLE_3_BACKBONE = (f"{name}:tree={BACKBONE}" for name in ("fasteagle", "eagle3"))
CHAINS = {"FastEagle": CHAIN, "EAGLE-3": "eagle3:tree=chain-3", "EAGLE-2": "eagle:tree=chain-3"}
ABLATED = ("mt_bench", "gsm8k")
FULL = {"full": FAST, "full, Backbone Expansion": FAST_BACKBONE, "without the tree": CHAIN}
OTHERS = {
    "without the cascade": f"parallel:tree={TREE}",
    "without the feature loss": f"nofeature:tree={TREE}",
}
AT_ONCE = (2, 4, 8)
SHORT = {
    "EAGLE": "eagle:tree=chain-2",
    "EAGLE-3": "eagle3:tree=chain-2",
    "FastEagle": "fasteagle:tree=chain-2",
}
THROUGHPUT = {"EAGLE": (1.30, 1.25, 1.21), "EAGLE-3": (1.75, 1.68, 1.58), "FastEagle": (1.95, 1.88, 1.78)}


GREEDY = {
    "Medusa": MEDUSA,
    "EAGLE-3": EAGLE_3,
    "EAGLE-3, Backbone Expansion": EAGLE_3_BACKBONE,
    "FastEagle": FAST,
    "FastEagle, Backbone Expansion": FAST_BACKBONE,
    "SpS": SMALL,
}
DRAWN = {
    "EAGLE-3": EAGLE_3_BACKBONE,
    "FastEagle": FAST_BACKBONE,
    "SpS": SMALL,
    "EAGLE-3, our noise": f"{EAGLE_3},proposal=noise",
    "FastEagle, our noise": f"{FAST},proposal=noise",
}


def _drawn(drafter: str, kind: str) -> Figure:
    return Figure(drawn(drafter, 1.0), SETS, kind, 1.0)


def _at(depth: int, drafter: str) -> Figure:
    """Accepted at this depth, of those accepted before."""
    return Figure(drafter, ("mt_bench",), f"{depth - 1}-α")


ENTRIES = (
    Entry(
        "fasteagle-table-1",
        "τ and speed of Medusa, EAGLE-3 and FastEagle on five sets",
        "Vicuna 13B",
        (
            *by_set(
                GREEDY,
                SETS,
                "τ",
                {
                    "Medusa": (2.59, 2.78, 2.64, 2.45, 2.09),
                    "EAGLE-3": (6.25, 7.14, 5.89, 5.77, 6.07),
                    "FastEagle": (6.20, 7.10, 5.85, 5.73, 6.03),
                    "SpS": (2.27, 2.57, 2.01, 2.03, 2.33),
                },
            ),
            *by_set(
                DRAWN,
                SETS,
                "τ",
                {
                    "EAGLE-3": (5.12, 5.92, 5.28, 5.09, 5.42),
                    "FastEagle": (5.07, 5.88, 5.24, 5.05, 5.38),
                    "SpS": (1.84, 1.97, 1.73, 1.78, 1.89),
                },
                1.0,
            ),
            *by_set(
                GREEDY,
                SETS,
                "× plain",
                {
                    "Medusa": (2.07, 2.50, 2.23, 2.08, 1.71),
                    "EAGLE-3": (5.08, 5.97, 4.82, 4.66, 4.51),
                    "FastEagle": (5.76, 6.64, 5.51, 5.32, 5.20),
                    "SpS": (1.93, 2.23, 1.77, 1.76, 1.93),
                },
            ),
            *by_set(
                DRAWN,
                SETS,
                "× plain",
                {
                    "EAGLE-3": (4.07, 4.65, 4.21, 3.99, 3.83),
                    "FastEagle": (4.85, 5.43, 5.03, 4.78, 4.62),
                    "SpS": (1.62, 1.72, 1.46, 1.52, 1.66),
                },
                1.0,
            ),
        ),
        (
            near(
                "τ of FastEagle lies within 0.1 of EAGLE-3's", Figure(FAST, SETS), Figure(EAGLE_3, SETS), 0.1
            ),
            over("EAGLE-3 commits more tokens than Medusa", Figure(EAGLE_3, SETS), Figure(MEDUSA, SETS)),
            near(
                "with Backbone Expansion τ of FastEagle lies within 0.1 of EAGLE-3's",
                Figure(FAST_BACKBONE, SETS),
                Figure(EAGLE_3_BACKBONE, SETS),
                0.1,
            ),
            over(
                "τ of FastEagle is larger at T = 0", Figure(FAST_BACKBONE, SETS), _drawn(FAST_BACKBONE, "τ")
            ),
            over("EAGLE-3 commits more tokens than SpS", Figure(EAGLE_3, SETS), Figure(SMALL, SETS)),
            over(
                "FastEagle is faster than EAGLE-3 at T = 1",
                _drawn(FAST_BACKBONE, "× plain"),
                _drawn(EAGLE_3_BACKBONE, "× plain"),
            ),
            over(
                "FastEagle is faster than EAGLE-3",
                Figure(FAST, SETS, "× plain"),
                Figure(EAGLE_3, SETS, "× plain"),
            ),
            over(
                "EAGLE-3 is faster than Medusa",
                Figure(EAGLE_3, SETS, "× plain"),
                Figure(MEDUSA, SETS, "× plain"),
            ),
        ),
        f"The paper's trees have depth 7 and 10 candidates a level; here heads grow {TREE} or {BACKBONE}. "
        "At T = 1 children are drawn (Algorithm 1), the tree is the backbone, and our noise stands beside "
        "it. SpS is our draft model of one block, which is distilled.",
    ),
    Entry(
        "fasteagle-table-2",
        "FastEagle without its tree, its cascade and its feature loss",
        "LLaMA-Instruct 3.1 8B",
        (
            *by_set(
                FULL | OTHERS,
                ABLATED,
                "τ",
                {
                    "full": (6.13, 6.23),
                    "without the tree": (5.15, 5.21),
                    "without the cascade": (4.81, 4.95),
                    "without the feature loss": (4.07, 4.18),
                },
            ),
            *by_set(
                FULL | OTHERS,
                ABLATED,
                "× plain",
                {
                    "full": (4.40, 4.48),
                    "without the tree": (3.81, 3.85),
                    "without the cascade": (3.52, 3.60),
                    "without the feature loss": (3.19, 3.25),
                },
            ),
        ),
        tuple(
            over(f"{row} commits fewer tokens", Figure(FAST, ABLATED), Figure(drafter, ABLATED))
            for row, drafter in ({"without the tree": CHAIN} | OTHERS).items()
        ),
        f"Of the last two: {alike('fasteagle')}",
    ),
    Entry(
        "fasteagle-table-3",
        "speed by the number of texts at once, chains of two",
        "LLaMA-Instruct 3.1 8B in vLLM",
        tuple(
            Line(
                row,
                f"batch {batch}",
                Figure(drafter, ("mt_bench",), "× plain", 0.0, batch),
                THROUGHPUT[row][i],
            )
            for row, drafter in SHORT.items()
            for i, batch in enumerate(AT_ONCE)
        ),
        (
            over(
                "FastEagle is faster than EAGLE-3 at batch 4",
                Figure(SHORT["FastEagle"], ("mt_bench",), "× plain", 0.0, 4),
                Figure(SHORT["EAGLE-3"], ("mt_bench",), "× plain", 0.0, 4),
            ),
            over(
                "FastEagle's gain falls from batch 2 to batch 8",
                Figure(SHORT["FastEagle"], ("mt_bench",), "× plain", 0.0, 2),
                Figure(SHORT["FastEagle"], ("mt_bench",), "× plain", 0.0, 8),
            ),
            over(
                "FastEagle is faster than plain decoding at batch 2",
                Figure(SHORT["FastEagle"], ("mt_bench",), "× plain", 0.0, 2),
                Figure(VANILLA, ("mt_bench",), "× plain", 0.0, 2),
            ),
        ),
        "The paper goes on to batch 56.",
    ),
    Entry(
        "fasteagle-figure-3",
        "acceptance by depth, of the guesses accepted before, on MT-bench",
        "LLaMA-Instruct 3.1 8B",
        tuple(
            Line(row, f"depth {depth}", _at(depth, drafter), ends.get(depth))
            for row, drafter, ends in (
                ("FastEagle", CHAINS["FastEagle"], {1: 0.81}),
                ("EAGLE-3", CHAINS["EAGLE-3"], {1: 0.81}),
                ("EAGLE-2", CHAINS["EAGLE-2"], {1: 0.69}),
            )
            for depth in (1, 2, 3)
        ),
        (
            over("FastEagle declines by depth", _at(1, CHAINS["FastEagle"]), _at(3, CHAINS["FastEagle"])),
            over("at depth 3 EAGLE-3 keeps more than FastEagle", _at(3, CHAINS["EAGLE-3"]), _at(3, CHAIN)),
            over("at depth 3 FastEagle keeps more than EAGLE-2", _at(3, CHAIN), _at(3, CHAINS["EAGLE-2"])),
        ),
        "The paper's heads go to depth 7: FastEagle from 0.81 to 0.74, EAGLE-2 from 0.69 to 0.51.",
    ),
)
