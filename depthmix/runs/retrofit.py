"""`depthmix retrofit`: read a pretrained model from a folder and write it with a mixer to another folder. Code in the
folder never runs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from depthmix.config import RetrofitConfig
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import writing
from depthmix.mixers import OptionError, mixer_class
from depthmix.mixers.leaks import check_rule
from depthmix.mixers.options import check_options
from depthmix.runs import foreign

CONFIG = "config.json"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")


def retrofit_folder(config: RetrofitConfig) -> str:
    """Retrofit a model and save it; returns a sentence on what was done."""
    given, out = Path(config.model), Path(config.out)
    for name, value in (("model", config.model), ("mixer", config.mixer), ("out", config.out)):
        if not value:
            raise UserError(f"retrofit: --{name} is missing; see `depthmix retrofit --help`")
    if not (given / CONFIG).is_file():
        what = "has no config.json" if given.is_dir() else "is a file" if given.exists() else "does not exist"
        advice = "give a folder that `save_pretrained` wrote; nothing is fetched"
        raise UserError(f"retrofit: {given} {what}: {advice}", CHECKPOINT)
    if os.path.lexists(out):
        raise UserError(f"retrofit: {out} exists already; choose another folder for --out")
    try:
        check_options(config.mixer, mixer_class(config.mixer).options, config.mixer_options)
        plain = foreign.load(given, "retrofit")
        dim, n_blocks = plain.get_input_embeddings().weight.shape[1], plain.config.num_hidden_layers
        check_rule(config.mixer, config.mixer_options, dim, n_blocks)
        model = foreign.retrofitted(plain, config.mixer, config.mixer_options)
    except OptionError as error:
        raise UserError(f"retrofit: {error}") from None
    unfinished = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    with writing(out):
        unfinished.mkdir(parents=True)  # fails for an existing folder, which must not be removed below
        try:
            model.save_pretrained(unfinished)
            for pattern in TOKENIZER:
                for file in given.glob(pattern):
                    shutil.copy(file, unfinished)
            unfinished.rename(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    how = "train it with `depthmix train --init`, or read it with AutoModelForCausalLM.from_pretrained after `import depthmix.hf`"
    return f"{type(model).__name__} with {config.mixer} in {out}; {how}"
