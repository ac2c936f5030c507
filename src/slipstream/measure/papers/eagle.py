"""EAGLE (Li et al. 2024): Figures 1, 2, 4, 7, 8 and Tables 1–8."""

from slipstream.measure.papers.entry import (
    HF,
    MEDUSA,
    SMALL,
    VANILLA,
    Claim,
    Entry,
    alike,
    by_batch,
    by_set,
    compare,
    figure,
    line,
    n_alpha,
    speed,
    tau,
)

TREE, CHAIN, SAME_TREE = (f"eagle:tree={tree}" for tree in ("fig9", "chain-5", "best-first-3x16"))
NOISE, NOISE_CHAIN = f"{TREE},proposal=noise", f"{CHAIN},proposal=noise"
TASKS = ("humaneval", "gsm8k", "alpaca")
FIXED = "fixed:tree=fig9"
INPUTS = {  # of heads that are trained beside EAGLE's, which reads features and shifted tokens
    "unshifted": "features and unshifted tokens",
    "features": "features",
    "tokens": "tokens",
}
UNSHIFTED, FEATURES, TOKENS = (f"{name}:tree=fig9" for name in INPUTS)
UNSHIFTED_CHAIN, FEATURES_CHAIN = "unshifted:tree=chain-5", "features:tree=chain-5"
BOTH = "features and shifted tokens"
ON_MT = (0.79, 0.74, 0.72, 0.73, 0.67)  # n-α of Table 2
ALGORITHM_1 = (
    "At T = 1 children are drawn and verified by Algorithm 1, as in the paper; our noise, which keeps the "
    "text of a seed, stands beside it."
)
DISTILLED = (
    "Our draft model is of one block, and distilled as in DistillSpec; the paper's SpS takes one as it is."
)


ENTRIES = {
    "eagle-figure-1": Entry(
        "speed on MT-bench at T = 0 beside Medusa and Lookahead",
        line("EAGLE", TREE, "× plain", 2.90),
        line("EAGLE, Medusa's tree", SAME_TREE, "× plain"),
        line("Medusa", MEDUSA, "× plain"),
        line("Lookahead", "lookahead", "× plain"),
        line("DistillSpec", SMALL, "× plain"),
        compare("EAGLE is 1.47 times as fast as Medusa or more", "× plain", TREE, MEDUSA, times=1.47),
        compare("EAGLE is faster than Medusa", "× plain", TREE, MEDUSA),
        compare("EAGLE is faster than Medusa in the same tree", "× plain", SAME_TREE, MEDUSA),
        compare("EAGLE is faster than Lookahead", "× plain", TREE, "lookahead"),
        compare("EAGLE is faster than DistillSpec", "× plain", TREE, SMALL),
        compare("EAGLE is faster than plain decoding", "× plain", TREE, VANILLA),
        note=f"The paper's Figure 1 has bars without numbers; 2.90 is Table 7's at batch 1. {DISTILLED}",
    ),
    "eagle-figure-2": Entry(
        "speed on MT-bench at T = 1",
        line("EAGLE", TREE, "× plain", T=1.0),
        line("EAGLE, chain", CHAIN, "× plain", T=1.0),
        line("EAGLE, our noise", NOISE, "× plain", T=1.0),
        line("DistillSpec", SMALL, "× plain", T=1.0),
        line("EAGLE", TREE, "× plain", 2.90),
        compare("EAGLE is faster than plain decoding at T = 1", "× plain", TREE, VANILLA, T=1.0),
        compare("its chain is faster than plain decoding at T = 1", "× plain", CHAIN, VANILLA, T=1.0),
        compare("EAGLE is faster than DistillSpec", "× plain", TREE, SMALL, T=1.0),
        Claim("it gains more at T = 0 than at T = 1", speed(TREE), speed(TREE, T=1.0)),
        note=f"{ALGORITHM_1} {DISTILLED}",
    ),
    "eagle-figure-4": Entry(
        "drafting from tokens, features, and both with the token shifted",
        line(BOTH, TREE, "× plain", 2.8),
        line("features", FEATURES, "× plain", 1.9),
        line("tokens", TOKENS, "× plain", 1.5),
        compare(
            "shifted tokens beside the features are faster than features alone", "× plain", TREE, FEATURES
        ),
        compare("features are faster than tokens", "× plain", FEATURES, TOKENS),
        note=alike("eagle"),
    ),
    "eagle-figure-7": Entry(
        "speed with and without the tree",
        line("tree", TREE, "× plain", 2.90),
        line("chain", CHAIN, "× plain"),
        compare("the tree is faster than the chain", "× plain", TREE, CHAIN),
        note="The paper's figure has bars without numbers: the chain about 2.3 to 2.7.",
    ),
    "eagle-figure-8": Entry(
        "τ, 0-α and 1-α by the head's inputs",
        line(BOTH, TREE, "τ", 3.94),
        *n_alpha(BOTH, CHAIN, ON_MT)[:2],
        *(
            line(row, f"{name}:tree={tree}", kind)
            for name, row in INPUTS.items()
            for kind, tree in (("τ", "fig9"), ("0-α", "chain-5"), ("1-α", "chain-5"))
        ),
        compare("τ is larger than with features and unshifted tokens", "τ", TREE, UNSHIFTED),
        compare("τ is larger than with features", "τ", TREE, FEATURES),
        compare("τ is larger than with tokens", "τ", TREE, TOKENS),
        compare("τ is larger with features than with tokens", "τ", FEATURES, TOKENS),
        compare(
            "0-α with features lies within 0.03 of that with unshifted tokens as well",
            "0-α",
            FEATURES_CHAIN,
            UNSHIFTED_CHAIN,
            within=0.03,
        ),
        compare(
            "1-α with features and unshifted tokens exceeds that with features",
            "1-α",
            UNSHIFTED_CHAIN,
            FEATURES_CHAIN,
        ),
        note=f"The paper's figure has bars without numbers; those here are Table 2's. {alike('eagle')}",
    ),
    "eagle-table-1": Entry(
        "τ on code, mathematics and instructions, at T = 0 and 1",
        *by_set("EAGLE", TREE, "τ", TASKS, (4.29, 4.00, 3.86)),
        *by_set("EAGLE", TREE, "τ", TASKS, (3.43, 3.29, 3.30), T=1.0),
        *by_set("our noise", NOISE, "τ", TASKS, T=1.0),
        *by_set("EAGLE", TREE, "× plain", TASKS, (3.33, 3.01, 2.79)),
        *by_set("EAGLE", TREE, "× plain", TASKS, (2.39, 2.34, 2.21), T=1.0),
        *by_set("our noise", NOISE, "× plain", TASKS, T=1.0),
        *(
            Claim(f"τ is larger at T = 0 than at T = 1: {name}", tau(TREE, name), tau(TREE, name, T=1.0))
            for name in TASKS
        ),
        Claim("τ is larger on code than on mathematics", tau(TREE, "humaneval"), tau(TREE, "gsm8k")),
        Claim("τ is larger on mathematics than on instructions", tau(TREE, "gsm8k"), tau(TREE, "alpaca")),
        note=ALGORITHM_1,
    ),
    "eagle-table-2": Entry(
        "τ and n-α on MT-bench, at T = 0 and 1",
        line("EAGLE", TREE, "τ", 3.94),
        *n_alpha("EAGLE", CHAIN, ON_MT),
        line("EAGLE", TREE, "τ", 3.17, T=1.0),
        *n_alpha("EAGLE", CHAIN, (0.71, 0.68, 0.66, 0.66, 0.65), T=1.0),
        line("our noise", NOISE, "τ", T=1.0),
        *n_alpha("our noise", NOISE_CHAIN, T=1.0),
        Claim("0-α exceeds 1-α", figure("0-α", CHAIN), figure("1-α", CHAIN)),
        Claim("4-α lies within 0.07 of 1-α", figure("4-α", CHAIN), figure("1-α", CHAIN), within=0.07),
        Claim("τ is larger at T = 0 than at T = 1", tau(TREE), tau(TREE, T=1.0)),
        note=ALGORITHM_1,
    ),
    "eagle-table-3": Entry(
        "a mixture of experts: τ and n-α",
        line("EAGLE", TREE, "τ", 3.25),
        *n_alpha("EAGLE", CHAIN, (0.67, 0.62, 0.61, 0.64, 0.63)),
        Claim("0-α exceeds 1-α", figure("0-α", CHAIN), figure("1-α", CHAIN)),
        note=(
            "Measured for a mixture of experts, given as --target. `slipstream tune --measure` says how many "
            "experts a pass reads."
        ),
        experts=True,
        model="Mixtral 8x7B",
    ),
    "eagle-table-4": Entry(
        "tokens a second beside a compiled and an uncompiled baseline",
        line("Hugging Face", HF, "tokens/s", 24.5),
        line("plain decoding (paper: gpt-fast)", VANILLA, "tokens/s", 55.1),
        line("EAGLE (paper: with gpt-fast)", TREE, "tokens/s", 100.2),
        compare("the compiled baseline is faster than Hugging Face", "tokens/s", VANILLA, HF),
        compare("EAGLE is faster than the compiled baseline", "× plain", TREE, VANILLA),
        note="Give --compile; --quantize int4 makes the paper's other column.",
        model="LLaMA2-Chat 7B, FP16",
    ),
    "eagle-table-5": Entry(
        "τ with and without the tree",
        line("chain", CHAIN, "τ", 3.20),
        line("tree", TREE, "τ", 3.94),
        compare("the tree commits more tokens than the chain", "τ", TREE, CHAIN),
    ),
    "eagle-table-6": Entry(
        "training on a fixed data set or on the target's own answers",
        line("fixed data set", FIXED, "τ", 3.62),
        line("the target's answers", TREE, "τ", 3.75),
        compare("the target's own answers give a larger τ", "τ", TREE, FIXED),
        note=alike("eagle"),
        model="LLaMA2-Chat 7B",
    ),
    "eagle-table-7": Entry(
        "speed by the number of texts at once",
        *by_batch("EAGLE", TREE, {1: 2.90, 2: None, 3: 2.65, 4: None}),
        Claim("the speed-up falls from batch 1 to batch 4", speed(TREE), speed(TREE, batch=4)),
    ),
    "eagle-table-8": Entry(
        "τ and n-α on code, mathematics and instructions, at T = 0",
        line("humaneval", TREE, "τ", 4.29, "humaneval"),
        *n_alpha("humaneval", CHAIN, (0.82, 0.77, 0.72, 0.69, 0.71), "humaneval"),
        line("gsm8k", TREE, "τ", 4.00, "gsm8k"),
        *n_alpha("gsm8k", CHAIN, (0.79, 0.71, 0.70, 0.71, 0.70), "gsm8k"),
        line("alpaca", TREE, "τ", 3.86, "alpaca"),
        *n_alpha("alpaca", CHAIN, (0.74, 0.68, 0.66, 0.66, 0.67), "alpaca"),
        *(
            Claim(f"0-α exceeds 1-α: {name}", figure("0-α", CHAIN, name), figure("1-α", CHAIN, name))
            for name in TASKS
        ),
    ),
}
