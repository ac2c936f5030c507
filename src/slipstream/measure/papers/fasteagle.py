"""FastEagle (2025): Tables 1–3 and Figure 3."""

from slipstream.measure.papers.entry import (
    MEDUSA,
    SMALL,
    VANILLA,
    Claim,
    Entry,
    Figure,
    Line,
    alike,
    by_batch,
    by_set,
    compare,
    figure,
    speed,
    tau,
)

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
FAST, EAGLE_3, NO_CASCADE, NO_FEATURES = (
    f"{name}:tree=best-first-3x16" for name in ("fasteagle", "eagle3", "parallel", "nofeature")
)
BACKBONE, BACKBONE_3 = (f"{name}:tree=backbone-3x10" for name in ("fasteagle", "eagle3"))
CHAIN, CHAIN_3, CHAIN_2 = (f"{name}:tree=chain-3" for name in ("fasteagle", "eagle3", "eagle"))
ABLATED = ("mt_bench", "gsm8k")
SHORT, SHORT_3, SHORT_2 = (f"{name}:tree=chain-2" for name in ("fasteagle", "eagle3", "eagle"))


def _at(depth: int, drafter: str) -> Figure:
    """Accepted at this depth, of those accepted before."""
    return figure(f"{depth - 1}-α", drafter)


ENTRIES = {
    "fasteagle-table-1": Entry(
        "τ and speed of Medusa, EAGLE-3 and FastEagle on five sets",
        *by_set("Medusa", MEDUSA, "τ", SETS, (2.59, 2.78, 2.64, 2.45, 2.09)),
        *by_set("EAGLE-3", EAGLE_3, "τ", SETS, (6.25, 7.14, 5.89, 5.77, 6.07)),
        *by_set("EAGLE-3, Backbone Expansion", BACKBONE_3, "τ", SETS),
        *by_set("FastEagle", FAST, "τ", SETS, (6.20, 7.10, 5.85, 5.73, 6.03)),
        *by_set("FastEagle, Backbone Expansion", BACKBONE, "τ", SETS),
        *by_set("SpS", SMALL, "τ", SETS, (2.27, 2.57, 2.01, 2.03, 2.33)),
        *by_set("EAGLE-3", BACKBONE_3, "τ", SETS, (5.12, 5.92, 5.28, 5.09, 5.42), T=1.0),
        *by_set("FastEagle", BACKBONE, "τ", SETS, (5.07, 5.88, 5.24, 5.05, 5.38), T=1.0),
        *by_set("SpS", SMALL, "τ", SETS, (1.84, 1.97, 1.73, 1.78, 1.89), T=1.0),
        *by_set("EAGLE-3, our noise", f"{EAGLE_3},proposal=noise", "τ", SETS, T=1.0),
        *by_set("FastEagle, our noise", f"{FAST},proposal=noise", "τ", SETS, T=1.0),
        *by_set("Medusa", MEDUSA, "× plain", SETS, (2.07, 2.50, 2.23, 2.08, 1.71)),
        *by_set("EAGLE-3", EAGLE_3, "× plain", SETS, (5.08, 5.97, 4.82, 4.66, 4.51)),
        *by_set("EAGLE-3, Backbone Expansion", BACKBONE_3, "× plain", SETS),
        *by_set("FastEagle", FAST, "× plain", SETS, (5.76, 6.64, 5.51, 5.32, 5.20)),
        *by_set("FastEagle, Backbone Expansion", BACKBONE, "× plain", SETS),
        *by_set("SpS", SMALL, "× plain", SETS, (1.93, 2.23, 1.77, 1.76, 1.93)),
        *by_set("EAGLE-3", BACKBONE_3, "× plain", SETS, (4.07, 4.65, 4.21, 3.99, 3.83), T=1.0),
        *by_set("FastEagle", BACKBONE, "× plain", SETS, (4.85, 5.43, 5.03, 4.78, 4.62), T=1.0),
        *by_set("SpS", SMALL, "× plain", SETS, (1.62, 1.72, 1.46, 1.52, 1.66), T=1.0),
        *by_set("EAGLE-3, our noise", f"{EAGLE_3},proposal=noise", "× plain", SETS, T=1.0),
        *by_set("FastEagle, our noise", f"{FAST},proposal=noise", "× plain", SETS, T=1.0),
        compare("τ of FastEagle lies within 0.1 of EAGLE-3's", "τ", FAST, EAGLE_3, *SETS, within=0.1),
        compare("EAGLE-3 commits more tokens than Medusa", "τ", EAGLE_3, MEDUSA, *SETS),
        compare(
            "with Backbone Expansion τ of FastEagle lies within 0.1 of EAGLE-3's",
            "τ",
            BACKBONE,
            BACKBONE_3,
            *SETS,
            within=0.1,
        ),
        Claim("τ of FastEagle is larger at T = 0", tau(BACKBONE, *SETS), tau(BACKBONE, *SETS, T=1.0)),
        compare("EAGLE-3 commits more tokens than SpS", "τ", EAGLE_3, SMALL, *SETS),
        compare("FastEagle is faster than EAGLE-3 at T = 1", "× plain", BACKBONE, BACKBONE_3, *SETS, T=1.0),
        compare("FastEagle is faster than EAGLE-3", "× plain", FAST, EAGLE_3, *SETS),
        compare("EAGLE-3 is faster than Medusa", "× plain", EAGLE_3, MEDUSA, *SETS),
        note="The paper's trees have depth 7 and 10 candidates a level; here heads grow best-first-3x16 or "
        "backbone-3x10. At T = 1 children are drawn (Algorithm 1), the tree is the backbone, and our noise "
        "stands beside it. SpS is our draft model of one block, which is distilled.",
        model="Vicuna 13B",
    ),
    "fasteagle-table-2": Entry(
        "FastEagle without its tree, its cascade and its feature loss",
        *by_set("full", FAST, "τ", ABLATED, (6.13, 6.23)),
        *by_set("full, Backbone Expansion", BACKBONE, "τ", ABLATED),
        *by_set("without the tree", CHAIN, "τ", ABLATED, (5.15, 5.21)),
        *by_set("without the cascade", NO_CASCADE, "τ", ABLATED, (4.81, 4.95)),
        *by_set("without the feature loss", NO_FEATURES, "τ", ABLATED, (4.07, 4.18)),
        *by_set("full", FAST, "× plain", ABLATED, (4.40, 4.48)),
        *by_set("full, Backbone Expansion", BACKBONE, "× plain", ABLATED),
        *by_set("without the tree", CHAIN, "× plain", ABLATED, (3.81, 3.85)),
        *by_set("without the cascade", NO_CASCADE, "× plain", ABLATED, (3.52, 3.60)),
        *by_set("without the feature loss", NO_FEATURES, "× plain", ABLATED, (3.19, 3.25)),
        compare("without the tree commits fewer tokens", "τ", FAST, CHAIN, *ABLATED),
        compare("without the cascade commits fewer tokens", "τ", FAST, NO_CASCADE, *ABLATED),
        compare("without the feature loss commits fewer tokens", "τ", FAST, NO_FEATURES, *ABLATED),
        note=f"Of the last two: {alike('fasteagle')}",
        model="LLaMA-Instruct 3.1 8B",
    ),
    "fasteagle-table-3": Entry(
        "speed by the number of texts at once, chains of two",
        *by_batch("EAGLE", SHORT_2, {2: 1.30, 4: 1.25, 8: 1.21}),
        *by_batch("EAGLE-3", SHORT_3, {2: 1.75, 4: 1.68, 8: 1.58}),
        *by_batch("FastEagle", SHORT, {2: 1.95, 4: 1.88, 8: 1.78}),
        compare("FastEagle is faster than EAGLE-3 at batch 4", "× plain", SHORT, SHORT_3, batch=4),
        Claim("FastEagle's gain falls from batch 2 to batch 8", speed(SHORT, batch=2), speed(SHORT, batch=8)),
        compare("FastEagle is faster than plain decoding at batch 2", "× plain", SHORT, VANILLA, batch=2),
        note="The paper goes on to batch 56.",
        model="LLaMA-Instruct 3.1 8B in vLLM",
    ),
    "fasteagle-figure-3": Entry(
        "acceptance by depth, of the guesses accepted before, on MT-bench",
        *(
            Line(row, f"depth {depth}", _at(depth, drafter), first if depth == 1 else None)
            for row, drafter, first in (
                ("FastEagle", CHAIN, 0.81),
                ("EAGLE-3", CHAIN_3, 0.81),
                ("EAGLE-2", CHAIN_2, 0.69),
            )
            for depth in (1, 2, 3)
        ),
        Claim("FastEagle declines by depth", _at(1, CHAIN), _at(3, CHAIN)),
        Claim("at depth 3 EAGLE-3 keeps more than FastEagle", _at(3, CHAIN_3), _at(3, CHAIN)),
        Claim("at depth 3 FastEagle keeps more than EAGLE-2", _at(3, CHAIN), _at(3, CHAIN_2)),
        note="The paper's heads go to depth 7: FastEagle from 0.81 to 0.74, EAGLE-2 from 0.69 to 0.51.",
        model="LLaMA-Instruct 3.1 8B",
    ),
}
