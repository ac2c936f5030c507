"""BiTA (Lin et al. 2024): Figures 1, 7, 8, 9 and Tables 1–4, 7–9."""

from slipstream.measure.papers.entry import VANILLA, Entry, Figure, Line, by_set, near, over

SETS = ("xsum", "mt_bench", "cip", "humaneval")
EFFICIENT = "bita:tree=backbone-3x5,hosts=4"
METHODS = {
    "straightforward": "bita:tree=chain-3,hosts=1",
    "fully tree-based, k = 1": "bita:tree=chain-3,hosts=4",
    "fully tree-based, k = 2": "bita:tree=full-3x2,hosts=4",
    "fully tree-based, k = 3": "bita:tree=full-3x3,hosts=4",
    "efficient tree": EFFICIENT,
}
MEDUSA = "medusa:tree=best-first-3x16"
MT = ("mt_bench",)
CODE = ("humaneval",)
HOSTS = "Four hosts carry masks; at hosts=0 every node does, as in the paper."
DESIGNS = {"mask tokens only": "masks_only:tree=chain-3", "shallow prompts": "shallow:tree=chain-3"}
PROMPTS = {count: f"prompts_{count}:tree=chain-3" for count in (4, 16, 64)}
MASKS = {count: f"masks_6:tree=chain-{count},hosts=1" for count in range(2, 7)}
ROWS = (*DESIGNS, "bi-directional tuning")


def _speed(drafter: str, sets: tuple[str, ...] = MT) -> Figure:
    return Figure(drafter, sets, "× plain")


def _decoding(name: str, sets: tuple[str, str], paper: dict[str, tuple[float, float]]) -> Entry:
    claims = [
        over(
            "the efficient tree is faster than straightforward decoding",
            _speed(EFFICIENT, sets),
            _speed(METHODS["straightforward"], sets),
        ),
        *(
            over(f"the efficient tree is faster than {method}", _speed(EFFICIENT, sets), _speed(arm, sets))
            for method, arm in METHODS.items()
            if method.startswith("fully")
        ),
        over(
            "the efficient tree commits more tokens than straightforward decoding",
            Figure(EFFICIENT, sets),
            Figure(METHODS["straightforward"], sets),
        ),
    ]
    lines = (*by_set(METHODS, sets, "× plain", paper), *by_set(METHODS, sets, "τ", {}))
    return Entry(name, f"decoding methods on {' and '.join(sets)}", "LLaMA-2-7B", lines, tuple(claims), HOSTS)


def _designs(name: str, sets: tuple[str, str], paper: dict[str, tuple[float, float]]) -> Entry:
    rows = dict(zip(ROWS, [*DESIGNS.values(), "deep:tree=chain-3"], strict=True))
    both = Figure(rows[ROWS[-1]], sets)
    claims = tuple(
        over(f"deep prompts commit more tokens than {row}", both, Figure(drafter, sets))
        for row, drafter in DESIGNS.items()
    )
    lines = (*by_set(rows, sets, "× plain", paper), *by_set(rows, sets, "τ", {}))
    return Entry(name, f"prompting designs on {' and '.join(sets)}", "LLaMA-2-7B", lines, claims)


ENTRIES = (
    Entry(
        "bita-figure-1",
        "speed on MT-bench over plain decoding",
        "Vicuna 7B",
        (Line("BiTA", "× plain", _speed(EFFICIENT), 2.35), Line("BiTA", "τ", Figure(EFFICIENT, MT))),
        (over("BiTA is faster than plain decoding", _speed(EFFICIENT), _speed(VANILLA)),),
        HOSTS,
    ),
    Entry(
        "bita-figure-7",
        "BiTA beside Medusa on MT-bench",
        "Vicuna 7B",
        (
            Line("BiTA", "× plain", _speed(EFFICIENT), 2.35),
            Line("Medusa", "× plain", _speed(MEDUSA), 1.97),
            Line("BiTA", "τ", Figure(EFFICIENT, MT)),
            Line("Medusa", "τ", Figure(MEDUSA, MT)),
        ),
        (over("BiTA is 1.19 times as fast as Medusa or more", _speed(EFFICIENT), _speed(MEDUSA), 1.19),),
        HOSTS,
    ),
    Entry(
        "bita-figure-8",
        "speed by the number of prompt tokens",
        "LLaMA-2-7B",
        tuple(
            Line(f"{count} prompts", kind, Figure(prompts, MT, kind))
            for count, prompts in PROMPTS.items()
            for kind in ("× plain", "τ")
        ),
        (
            over("16 prompts are faster than 4", _speed(PROMPTS[16]), _speed(PROMPTS[4])),
            near("64 prompts are as fast as 16, to 0.1", _speed(PROMPTS[64]), _speed(PROMPTS[16]), 0.1),
        ),
    ),
    Entry(
        "bita-figure-9",
        "speed by the number of mask tokens",
        "LLaMA-2-7B",
        tuple(
            Line("first masks of the head", f"{count} masks", Figure(f"bita:tree=chain-{count},hosts=1", MT))
            for count in (2, 3)
        )
        + tuple(
            Line(f"of a head of six, {kind}", f"{count} masks", Figure(masks, MT, kind))
            for kind in ("× plain", "τ")
            for count, masks in MASKS.items()
        ),
        (
            over(
                "three masks commit more tokens than two",
                Figure("bita:tree=chain-3,hosts=1", MT),
                Figure("bita:tree=chain-2,hosts=1", MT),
            ),
            over("three masks are faster than six", _speed(MASKS[3]), _speed(MASKS[6])),
        ),
        "The paper trains an arm for each number; here the first masks of one head draft.",
    ),
    Entry(
        "bita-table-1",
        "speed on summaries, MT-bench, conversation and code",
        "LLaMA-2-7B",
        (
            *by_set({"BiTA": EFFICIENT}, SETS, "× plain", {"BiTA": (2.19, 2.38, 2.29, 2.73)}),
            *by_set({"BiTA": EFFICIENT}, SETS, "τ", {}),
        ),
        tuple(
            over(f"code gains more than {name}", _speed(EFFICIENT, CODE), _speed(EFFICIENT, (name,)))
            for name in SETS[:3]
        ),
        HOSTS,
    ),
    Entry(
        "bita-table-2",
        "BiTA beside methods of speculative decoding on MT-bench",
        "LLaMA-2-7B",
        (
            Line("Lookahead", "× plain", _speed("lookahead"), 1.70),
            Line("self-speculative", "× plain", _speed("self-speculative")),
            Line("draft model", "× plain", _speed("draft-model:tree=chain-5")),
            Line("BiTA", "× plain", _speed(EFFICIENT), 2.38),
        ),
        (
            over("BiTA is faster than Lookahead", _speed(EFFICIENT), _speed("lookahead")),
            over("BiTA is faster than self-speculation", _speed(EFFICIENT), _speed("self-speculative")),
        ),
        "Self-speculation: `slipstream tune --drafter self-speculative` finds the blocks to skip first.",
    ),
    _designs(
        "bita-table-3",
        ("cip", "humaneval"),
        dict(zip(ROWS, ((1.94, 2.12), (2.01, 2.31), (2.29, 2.73)), strict=True)),
    ),
    _decoding(
        "bita-table-4",
        ("xsum", "mt_bench"),
        {
            "straightforward": (1.63, 1.82),
            "fully tree-based, k = 1": (1.81, 2.04),
            "fully tree-based, k = 2": (2.02, 2.23),
            "fully tree-based, k = 3": (1.97, 2.05),
            "efficient tree": (2.19, 2.38),
        },
    ),
    Entry(
        "bita-table-7",
        "speed by category of MT-bench",
        "LLaMA-2-7B",
        tuple(
            Line("BiTA", category, Figure(EFFICIENT, (f"mt_bench/{category}",), "× plain"), paper)
            for category, paper in (
                ("coding", 2.68),
                ("extraction", 2.94),
                ("humanities", 2.21),
                ("math", 2.69),
                ("reasoning", 2.33),
                ("roleplay", 2.11),
                ("stem", 2.37),
                ("writing", 2.26),
            )
        ),
        (
            over(
                "coding gains more than roleplay",
                _speed(EFFICIENT, ("mt_bench/coding",)),
                _speed(EFFICIENT, ("mt_bench/roleplay",)),
            ),
            over(
                "extraction gains more than writing",
                _speed(EFFICIENT, ("mt_bench/extraction",)),
                _speed(EFFICIENT, ("mt_bench/writing",)),
            ),
        ),
        "The first turns of MT-bench: a larger --limit gives each category more of them.",
    ),
    _designs(
        "bita-table-8",
        ("xsum", "mt_bench"),
        dict(zip(ROWS, ((1.95, 2.00), (2.03, 2.06), (2.19, 2.38)), strict=True)),
    ),
    _decoding(
        "bita-table-9",
        ("cip", "humaneval"),
        {
            "straightforward": (1.89, 2.06),
            "fully tree-based, k = 1": (2.02, 2.39),
            "fully tree-based, k = 2": (2.14, 2.58),
            "fully tree-based, k = 3": (1.93, 2.29),
            "efficient tree": (2.29, 2.73),
        },
    ),
)
