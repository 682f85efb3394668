"""A small recipe for tests, and a training without a folder that is a fake."""

import yaml

from depthmix.compare.recipe import check_recipe
from depthmix.compare.rows import Run
from depthmix.config import CompareConfig
from depthmix.errors import DIVERGED, UserError
from depthmix.values import build_config
from train import small

SIZES = {
    "dim": 16,
    "n_blocks": 2,
    "n_heads": 2,
    "seq_len": 16,
    "batch_size": 4,
    "steps": 6,
    "warmup": 2,
    "eval_tokens": 64,
}
ARMS = [
    "residual",
    "attnres:block_size=2",
    {"label": "slow", "mixer": "dca", "set": {"groups": [{"match": "mixer.b.*", "lr": 0.1}]}},
]


def write(folder, name="small", **changes):
    """Write a recipe; a change to None leaves a key out."""
    said = {
        "question": "Which | is\nbetter?",
        **SIZES,
        "save_models": False,
        "eval_every": 0,
        "seeds": [0, 1],
        "domains": {"words": str(small.data())},
        "power": {"difference": 0.01, "spread": [0.005]},
        "arms": ARMS,
    }
    said = {key: value for key, value in {**said, **changes}.items() if value is not None}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(said, sort_keys=False))
    return path


def config(path, out, **changes):
    """Return the configuration of `depthmix compare` with a recipe and flags."""
    given = {"recipe": str(path), "out": str(out), "device": "cpu", "quiet": True, **changes}
    return build_config("compare", CompareConfig, given)


def read(path, **changes):
    """Return the checked recipe in a file."""
    return check_recipe(config(path, path.parent / "out", **changes))


def a_run(arm, seed, loss, **more):
    """A finished run with this final loss."""
    curve = more.pop("curve", [(100, 10.0, loss)])
    return Run(arm, seed, "", 10, 100, loss, None, 1000, 0, 1.0, None, None, curve, **more)


class Training:
    """Stands in for train_briefly: a loss by arm and seed, a duration, and what is to go wrong."""

    def __init__(self):
        self.made, self.fail, self.during = [], {}, None

    def __call__(self, config, data, *, label="", stop=lambda left: False):
        if self.during is not None:
            self.during(config)
        if stop(0.0):
            return None
        if error := self.fail.get((config.mixer, config.seed)):
            raise error
        self.made.append((config.mixer, config.seed))
        loss = {"residual": 4.0, "attnres": 3.9, "dca": 3.95}.get(config.mixer, 4.0) + 0.01 * config.seed
        return {
            "mixer": config.mixer,
            "seed": config.seed,
            "steps": config.steps,
            "tokens": config.steps * 64,
            "val_loss": loss,
            "bits_per_byte": 1.5,
            "parameters": {"total": 1000, "added_by_mixer": 10},
            "step_seconds": 0.25,
            "step_quartiles": None,
            "core_wait": None,
            "seconds": 0.25 * config.steps,
            "peak_memory": None,
            "wall_seconds": 100.0,
            "build_seconds": 1.0,
            "first_seconds": 2.0,
            "eval_seconds": 0.1,
            "train_curve": [[3, loss + 1.123456789], [config.steps, loss]],
            "val_curve": [[config.steps, loss]],
        }


def diverged():
    return UserError("the loss became nan at step 3", DIVERGED)
