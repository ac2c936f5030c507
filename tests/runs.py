"""Small training runs, of seconds."""

from slipstream.drafters.recipe import Recipe
from slipstream.training.recipe import load_recipe, recipe_class
from slipstream.training.trainer import Trainer

OWN_SIZES = (("head", "depth", 3), ("loss", "unroll", 2))


def recipe(data: str, method: str = "eagle", **schedule) -> Recipe:
    settings = {"batch_tokens": 64, "evaluate_every": 5, "save_every": 4, "epochs": 1.0} | schedule
    kind = recipe_class(method, "")
    depth, unroll = (
        {name: size} if name in kind.section(part).model_fields else {} for part, name, size in OWN_SIZES
    )
    return load_recipe(
        None,
        data={"files": [data], "max_length": 40, "held_out_tokens": 16},
        method=method,
        head={"draft_vocab": 40, "tree": "[[0],[1],[0,0],[1,0]]", **depth},
        schedule=settings,
        loss=unroll,
    )


def train(chat, settings: Recipe, directory, resume: bool = False, show=lambda seen: None):
    trainer = Trainer(chat, settings, str(directory), resume)
    trainer.prepare()
    return trainer.run(show)
