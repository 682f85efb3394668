"""A training that is not one, for comparisons that are: it leaves the run folder a training would have left."""

import math
import shutil
from dataclasses import asdict
from pathlib import Path

import yaml

from compare.run_folders import write_run
from depthmix.config import CompareConfig
from depthmix.runs.code_checksums import code_of
from depthmix.runs.code_record import record_code
from depthmix.runs.folder import RunFolder
from train import small

SECONDS = {"residual": 0.2, "attnres": 0.3, "dca": 0.5, "rezero": 0.2}
FINAL = {"residual": 4.0, "attnres": 3.9, "dca": 4.1, "rezero": 3.95}


def configuration(tmp_path, **values):
    defaults = {"data": str(small.data()), "out": str(tmp_path / "out"), "steps": 400, "warmup": 40, "eval_every": 100}
    defaults |= {"arms": ["residual", "attnres:block_size=4", "dca"], "quiet": True, "device": "cpu"}
    defaults |= {"dim": 8, "n_blocks": 2, "n_heads": 2, "seq_len": 16, "batch_size": 4}
    return CompareConfig(**(defaults | values))


class Trainer:
    """Stands in for the loop: writes the run folder that a training would have left."""

    def __init__(self):
        self.calls, self.measured, self.generated = [], [], []
        self.fail, self.results = {}, {}  # by mixer and seed

    def train(self, config, *, label="", on_step=None):
        if RunFolder(config.out).has_result():  # as a training does with a finished run
            return RunFolder(config.out)
        self.calls.append((config.mixer, config.seed))
        if error := self.fail.get((config.mixer, config.seed)):
            raise error
        points = math.ceil(config.steps / config.eval_every)
        final = FINAL[config.mixer] + 0.01 * config.seed
        losses = [final + (points - 1 - i) * 0.5 for i in range(points)]
        options = {"steps": config.steps, "seed": config.seed, "mixer": config.mixer}
        options |= self.results.get((config.mixer, config.seed), {})
        write_run(
            config.out, losses, eval_every=config.eval_every, **{"step_seconds": SECONDS[config.mixer], **options}
        )
        (Path(config.out) / "recipe.yaml").write_text(yaml.safe_dump(asdict(config)))
        shutil.copy(Path(config.data) / "meta.json", Path(config.out) / "data.json")
        record_code(RunFolder(config.out), 0, config.mixer, code_of(config.mixer))
        return RunFolder(config.out)

    def measure_step_times(self, configs, stopping=None):
        self.measured.append([config.mixer for config in configs])
        return [SECONDS[config.mixer] * (1 + 0.5 * (len(self.measured) - 1)) for config in configs]

    def generate_text(self, run, prompt, max_tokens, temperature, top_p, seed):
        self.generated.append(str(run))
        return prompt + " and <script>alert('sample')</script>"
