"""`depthmix retrofit`: a folder with a pretrained model in, one with a mixer in it out. Nothing is fetched, nothing unpickled, no code of a folder run."""

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
        what = "has no config.json" if given.is_dir() else "is a file" if given.exists() else "does not exist"
        advice = "give a folder that `save_pretrained` wrote; nothing is fetched"
        raise UserError(f"retrofit: {given} {what}: {advice}", CHECKPOINT)
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
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # which are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds: transformers, safetensors and the hub's validation have their own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        raise UserError(f"retrofit: the model in {folder} cannot be loaded: {said}", CHECKPOINT) from None
    for name, *shapes in sorted(found["mismatched_keys"]):
        sizes = " and not ".join(str(list(shape)) for shape in shapes)
        raise UserError(f"retrofit: {folder} does not fit together: {name} has the shape {sizes}", CHECKPOINT)
    for name in sorted(found["missing_keys"]):
        raise UserError(f"retrofit: {folder} does not fit together: {name} is not in its weights", CHECKPOINT)
    return model
