"""EAGLE (Li et al. 2024): Figures 1, 2, 4, 7, 8 and Tables 1–8."""

from slipstream.measure.papers.entry import (
    HF,
    VANILLA,
    Entry,
    Figure,
    Line,
    alike,
    by_set,
    drawn,
    n_alpha,
    near,
    over,
)

TREE, CHAIN = "eagle:tree=fig9", "eagle:tree=chain-5"
NOISE = f"{TREE},proposal=noise"
ALGORITHM_1 = (
    "At T = 1 children are drawn and verified by Algorithm 1, as in the paper; our noise, which keeps the "
    "text of a seed, stands beside it."
)
MT = ("mt_bench",)
TASKS = ("humaneval", "gsm8k", "alpaca")
INPUTS = {
    "eagle": "features and shifted tokens",
    "unshifted": "features and unshifted tokens",
    "features": "features",
    "tokens": "tokens",
}
OTHERS = tuple(INPUTS)[1:]
SPEEDS = {
    "EAGLE": TREE,
    "Medusa": "medusa:tree=best-first-3x16",
    "Lookahead": "lookahead",
    "DistillSpec": "draft-model:tree=chain-5",
}
EQUAL = "eagle:tree=best-first-3x16"
SMALL = (
    "Our draft model is of one block, and distilled as in DistillSpec; the paper's SpS takes one as it is."
)


def _speed(drafter: str, temperature: float = 0.0, batch: int = 1) -> Figure:
    return Figure(
        drafter if drafter == VANILLA else drawn(drafter, temperature), MT, "× plain", temperature, batch
    )


def _arm(name: str, like: str = TREE) -> str:
    """A head of other inputs with the same tree."""
    return like.replace("eagle", name)


def _tau(name: str, temperature: float = 0.0) -> Figure:
    return Figure(drawn(TREE, temperature), (name,), "τ", temperature)


ENTRIES = (
    Entry(
        "eagle-figure-1",
        "speed on MT-bench at T = 0 beside Medusa and Lookahead",
        "Vicuna 7B",
        (
            Line("EAGLE", "× plain", _speed(TREE), 2.90),
            Line("EAGLE, Medusa's tree", "× plain", _speed(EQUAL)),
            *(Line(row, "× plain", _speed(SPEEDS[row])) for row in SPEEDS if row != "EAGLE"),
        ),
        (
            over(
                "EAGLE is 1.47 times as fast as Medusa or more", _speed(TREE), _speed(SPEEDS["Medusa"]), 1.47
            ),
            over("EAGLE is faster than Medusa", _speed(TREE), _speed(SPEEDS["Medusa"])),
            over("EAGLE is faster than Medusa in the same tree", _speed(EQUAL), _speed(SPEEDS["Medusa"])),
            over("EAGLE is faster than Lookahead", _speed(TREE), _speed("lookahead")),
            over("EAGLE is faster than DistillSpec", _speed(TREE), _speed(SPEEDS["DistillSpec"])),
            over("EAGLE is faster than plain decoding", _speed(TREE), _speed(VANILLA)),
        ),
        f"The paper's Figure 1 has bars without numbers; 2.90 is Table 7's at batch 1. {SMALL}",
    ),
    Entry(
        "eagle-figure-2",
        "speed on MT-bench at T = 1",
        "Vicuna 7B",
        (
            Line("EAGLE", "× plain, T = 1", _speed(TREE, 1.0)),
            Line("EAGLE, chain", "× plain, T = 1", _speed(CHAIN, 1.0)),
            Line("EAGLE, our noise", "× plain, T = 1", _speed(NOISE, 1.0)),
            Line("DistillSpec", "× plain, T = 1", _speed(SPEEDS["DistillSpec"], 1.0)),
            Line("EAGLE", "× plain", _speed(TREE), 2.90),
        ),
        (
            over("EAGLE is faster than plain decoding at T = 1", _speed(TREE, 1.0), _speed(VANILLA, 1.0)),
            over(
                "its chain is faster than plain decoding at T = 1", _speed(CHAIN, 1.0), _speed(VANILLA, 1.0)
            ),
            over("EAGLE is faster than DistillSpec", _speed(TREE, 1.0), _speed(SPEEDS["DistillSpec"], 1.0)),
            over("it gains more at T = 0 than at T = 1", _speed(TREE), _speed(TREE, 1.0)),
        ),
        f"{ALGORITHM_1} {SMALL}",
    ),
    Entry(
        "eagle-figure-4",
        "drafting from tokens, features, and both with the token shifted",
        "Vicuna 7B",
        (
            Line(INPUTS["eagle"], "× plain", _speed(TREE), 2.8),
            Line(INPUTS["features"], "× plain", _speed(_arm("features")), 1.9),
            Line(INPUTS["tokens"], "× plain", _speed(_arm("tokens")), 1.5),
        ),
        (
            over(
                "shifted tokens beside the features are faster than features alone",
                _speed(TREE),
                _speed(_arm("features")),
            ),
            over("features are faster than tokens", _speed(_arm("features")), _speed(_arm("tokens"))),
        ),
        alike("eagle"),
    ),
    Entry(
        "eagle-figure-7",
        "speed with and without the tree",
        "Vicuna 7B",
        (Line("tree", "× plain", _speed(TREE), 2.90), Line("chain", "× plain", _speed(CHAIN))),
        (over("the tree is faster than the chain", _speed(TREE), _speed(CHAIN)),),
        "The paper's figure has bars without numbers: the chain about 2.3 to 2.7.",
    ),
    Entry(
        "eagle-figure-8",
        "τ, 0-α and 1-α by the head's inputs",
        "Vicuna 7B",
        (
            Line(INPUTS["eagle"], "τ", _tau("mt_bench"), 3.94),
            *n_alpha(INPUTS["eagle"], CHAIN, "mt_bench", (0.79, 0.74, 0.72, 0.73, 0.67))[:2],
            *(
                Line(INPUTS[arm], kind, Figure(_arm(arm, tree), MT, kind))
                for arm in OTHERS
                for kind, tree in (("τ", TREE), ("0-α", CHAIN), ("1-α", CHAIN))
            ),
        ),
        (
            *(
                over(f"τ is larger than with {INPUTS[arm]}", _tau("mt_bench"), Figure(_arm(arm), MT))
                for arm in OTHERS
            ),
            over(
                "τ is larger with features than with tokens",
                Figure(_arm("features"), MT),
                Figure(_arm("tokens"), MT),
            ),
            near(
                "0-α with features lies within 0.03 of that with unshifted tokens as well",
                Figure(_arm("features", CHAIN), MT, "0-α"),
                Figure(_arm("unshifted", CHAIN), MT, "0-α"),
                0.03,
            ),
            over(
                "1-α with features and unshifted tokens exceeds that with features",
                Figure(_arm("unshifted", CHAIN), MT, "1-α"),
                Figure(_arm("features", CHAIN), MT, "1-α"),
            ),
        ),
        f"The paper's figure has bars without numbers; those here are Table 2's. {alike('eagle')}",
    ),
    Entry(
        "eagle-table-1",
        "τ on code, mathematics and instructions, at T = 0 and 1",
        "Vicuna 7B",
        (
            *by_set({"EAGLE": TREE}, TASKS, "τ", {"EAGLE": (4.29, 4.00, 3.86)}),
            *by_set({"EAGLE": TREE, "our noise": NOISE}, TASKS, "τ", {"EAGLE": (3.43, 3.29, 3.30)}, 1.0),
            *by_set({"EAGLE": TREE}, TASKS, "× plain", {"EAGLE": (3.33, 3.01, 2.79)}),
            *by_set(
                {"EAGLE": TREE, "our noise": NOISE}, TASKS, "× plain", {"EAGLE": (2.39, 2.34, 2.21)}, 1.0
            ),
        ),
        (
            *(
                over(f"τ is larger at T = 0 than at T = 1: {name}", _tau(name), _tau(name, 1.0))
                for name in TASKS
            ),
            over("τ is larger on code than on mathematics", _tau("humaneval"), _tau("gsm8k")),
            over("τ is larger on mathematics than on instructions", _tau("gsm8k"), _tau("alpaca")),
        ),
        ALGORITHM_1,
    ),
    Entry(
        "eagle-table-2",
        "τ and n-α on MT-bench, at T = 0 and 1",
        "Vicuna 7B",
        (
            Line("EAGLE", "τ", _tau("mt_bench"), 3.94),
            *n_alpha("EAGLE", CHAIN, "mt_bench", (0.79, 0.74, 0.72, 0.73, 0.67)),
            Line("EAGLE", "τ, T = 1", _tau("mt_bench", 1.0), 3.17),
            *n_alpha("EAGLE", CHAIN, "mt_bench", (0.71, 0.68, 0.66, 0.66, 0.65), 1.0),
            Line("our noise", "τ, T = 1", Figure(NOISE, MT, "τ", 1.0)),
            *n_alpha("our noise", f"{CHAIN},proposal=noise", "mt_bench", (None,) * 5, 1.0),
        ),
        (
            over("0-α exceeds 1-α", Figure(CHAIN, MT, "0-α"), Figure(CHAIN, MT, "1-α")),
            near("4-α lies within 0.07 of 1-α", Figure(CHAIN, MT, "4-α"), Figure(CHAIN, MT, "1-α"), 0.07),
            over("τ is larger at T = 0 than at T = 1", _tau("mt_bench"), _tau("mt_bench", 1.0)),
        ),
        ALGORITHM_1,
    ),
    Entry(
        "eagle-table-3",
        "a mixture of experts: τ and n-α",
        "Mixtral 8x7B",
        (
            Line("EAGLE", "τ", _tau("mt_bench"), 3.25),
            *n_alpha("EAGLE", CHAIN, "mt_bench", (0.67, 0.62, 0.61, 0.64, 0.63)),
        ),
        (over("0-α exceeds 1-α", Figure(CHAIN, MT, "0-α"), Figure(CHAIN, MT, "1-α")),),
        "Measured for a mixture of experts, given as --target. `slipstream tune --measure` says how many "
        "experts a pass reads.",
        experts=True,
    ),
    Entry(
        "eagle-table-4",
        "tokens a second beside a compiled and an uncompiled baseline",
        "LLaMA2-Chat 7B, FP16",
        (
            Line("Hugging Face", "tokens/s", Figure(HF, MT, "tokens/s"), 24.5),
            Line("plain decoding (paper: gpt-fast)", "tokens/s", Figure(VANILLA, MT, "tokens/s"), 55.1),
            Line("EAGLE (paper: with gpt-fast)", "tokens/s", Figure(TREE, MT, "tokens/s"), 100.2),
        ),
        (
            over(
                "the compiled baseline is faster than Hugging Face",
                Figure(VANILLA, MT, "tokens/s"),
                Figure(HF, MT, "tokens/s"),
            ),
            over("EAGLE is faster than the compiled baseline", _speed(TREE), _speed(VANILLA)),
        ),
        "Give --compile; --quantize int4 makes the paper's other column.",
    ),
    Entry(
        "eagle-table-5",
        "τ with and without the tree",
        "Vicuna 7B",
        (Line("chain", "τ", Figure(CHAIN, MT), 3.20), Line("tree", "τ", _tau("mt_bench"), 3.94)),
        (over("the tree commits more tokens than the chain", _tau("mt_bench"), Figure(CHAIN, MT)),),
    ),
    Entry(
        "eagle-table-6",
        "training on a fixed data set or on the target's own answers",
        "LLaMA2-Chat 7B",
        (
            Line("fixed data set", "τ", Figure("fixed:tree=fig9", MT), 3.62),
            Line("the target's answers", "τ", _tau("mt_bench"), 3.75),
        ),
        (over("the target's own answers give a larger τ", _tau("mt_bench"), Figure("fixed:tree=fig9", MT)),),
        alike("eagle"),
    ),
    Entry(
        "eagle-table-7",
        "speed by the number of texts at once",
        "Vicuna 7B",
        tuple(
            Line("EAGLE", f"batch {batch}", _speed(TREE, 0.0, batch), paper)
            for batch, paper in ((1, 2.90), (2, None), (3, 2.65), (4, None))
        ),
        (over("the speed-up falls from batch 1 to batch 4", _speed(TREE), _speed(TREE, 0.0, 4)),),
    ),
    Entry(
        "eagle-table-8",
        "τ and n-α on code, mathematics and instructions, at T = 0",
        "Vicuna 7B",
        (
            Line("humaneval", "τ", _tau("humaneval"), 4.29),
            *n_alpha("humaneval", CHAIN, "humaneval", (0.82, 0.77, 0.72, 0.69, 0.71)),
            Line("gsm8k", "τ", _tau("gsm8k"), 4.00),
            *n_alpha("gsm8k", CHAIN, "gsm8k", (0.79, 0.71, 0.70, 0.71, 0.70)),
            Line("alpaca", "τ", _tau("alpaca"), 3.86),
            *n_alpha("alpaca", CHAIN, "alpaca", (0.74, 0.68, 0.66, 0.66, 0.67)),
        ),
        tuple(
            over(f"0-α exceeds 1-α: {name}", Figure(CHAIN, (name,), "0-α"), Figure(CHAIN, (name,), "1-α"))
            for name in TASKS
        ),
    ),
)
