"""`depthmix retrofit`: a folder with a pretrained model in, one with a mixer in it out. Nothing is fetched, nothing unpickled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from depthmix.config import RetrofitConfig
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import writing
from depthmix.mixers import OptionError, mixer_class
from depthmix.mixers.options import check_options

CONFIG = "config.json"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")


def retrofit_folder(config: RetrofitConfig) -> str:
    """Retrofit and save; a sentence on what was done."""
    given, out = Path(config.model), Path(config.out)
    for name, value in (("model", config.model), ("mixer", config.mixer), ("out", config.out)):
        if not value:
            raise UserError(f"retrofit: --{name} is missing; see `depthmix retrofit --help`")
    if not (given / CONFIG).is_file():
        what = "is not a folder of `save_pretrained`: it has no config.json" if given.is_dir() else "does not exist"
        raise UserError(f"retrofit: {given} {what}", CHECKPOINT)
    if out.exists():
        raise UserError(f"retrofit: {out} exists already; choose another folder for --out")
    try:
        from depthmix.hf import retrofit
    except ImportError:
        raise UserError("retrofit needs transformers: pip install 'depthmix[hf]'") from None
    try:
        check_options(config.mixer, mixer_class(config.mixer).options, config.mixer_options)
        model = retrofit(_load(given), config.mixer, **config.mixer_options)
    except OptionError as error:
        raise UserError(f"retrofit: {error}") from None
    unfinished = out.with_name(f".tmp-{out.name}")
    with writing(out):
        try:
            model.save_pretrained(unfinished)
            for pattern in TOKENIZER:
                for file in given.glob(pattern):
                    shutil.copy(file, unfinished)
            unfinished.rename(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return f"{type(model).__name__} with {config.mixer} in {out}; AutoModelForCausalLM.from_pretrained reads it after `import depthmix.hf`"


def _load(folder: Path) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"retrofit: the model in {folder} cannot be loaded: {first}", CHECKPOINT) from None
