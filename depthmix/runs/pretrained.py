"""Folders for Hugging Face's `from_pretrained`: make one of a run, and read one as a model.

A run folder gets a config.json, a generation_config.json, a tokenizer_config.json beside its tokenizer.json, two lines of code
that import the model's classes, and a model.safetensors.index.json that points to the weights in the newest checkpoint. Nothing is
copied. Neither direction needs transformers. Nothing here unpickles, and nothing runs the code of a folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from depthmix.data.tokenizer import END
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import find_json_object, read_json_object, reading, write_file, writing
from depthmix.mixers.defaults import all_options
from depthmix.models import DecoderConfig
from depthmix.models.exchange import BASE, CODE, FIELDS, HEAD, MODEL_TYPE
from depthmix.runs.checkpoint import MODEL
from depthmix.runs.folder import CHECKPOINTS, RECIPE, with_all_options

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
INDEX = f"{MODEL}.index.json"


def describe_run(run: Path, checkpoint: Path, model: Any, seq_len: int, end: int | None) -> None:
    """Make a run folder readable for `from_pretrained`.

    Args:
        run: The run folder.
        checkpoint: The checkpoint in it whose weights to name.
        model: The model.
        seq_len: Tokens per training sequence.
        end: Id of the token between documents, if any.
    """
    ids = {f"{kind}_token_id": end for kind in ("bos", "eos", "pad")} if end is not None else {}
    tokens = {f"{kind}_token": END for kind in ("bos", "eos", "pad")} if end is not None else {}
    named = dict(model.named_parameters())  # tied weights come once, as in the checkpoint
    size = sum(p.numel() * p.element_size() for p in named.values())
    place = f"{checkpoint.relative_to(run).as_posix()}/{MODEL}"
    files: dict[str, dict[str, Any]] = {
        CONFIG: {**_spelt_out(model.described(seq_len)), **ids},
        GENERATION: ids,
        TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": seq_len,
            "padding_side": "left",  # so that a continuation follows its prompt
            "clean_up_tokenization_spaces": False,
            **tokens,
        },
        INDEX: {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(named, place)},
    }
    # The index is written last: once it names the checkpoint, all other files exist.
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}
    if (code := model.code()) is not None:
        texts = {CODE: code, **texts}
    for name, text in texts.items():
        path, data = run / name, text.encode()
        with writing(path):
            if not path.exists() or path.read_bytes() != data:
                write_file(path, data)


def _spelt_out(described: dict[str, Any]) -> dict[str, Any]:
    """Fill in every option of the mixer, since a later version's defaults may differ."""
    if isinstance(rule := described.get("depthmix"), dict):  # a retrofitted model
        return {**described, "depthmix": {**rule, "options": all_options(rule["mixer"], rule["options"])}}
    return with_all_options(described)


@dataclass
class Pretrained:
    """The content of a `save_pretrained` folder, under the decoder's own parameter names."""

    decoder: DecoderConfig
    tensors: dict[str, Tensor]
    seq_len: int | None  # tokens per training sequence, if known
    end: int | None  # id of the token that ends a text, if any


def is_pretrained(path: Path) -> bool:
    """Tell whether a folder looks like one of `save_pretrained` and not like a run."""
    with reading(path):
        return (path / CONFIG).is_file() and not any((path / name).exists() for name in (RECIPE, CHECKPOINTS))


def model_type(path: Path) -> str | None:
    """Return the model type in a folder's config.json; None if there is none."""
    kind = find_json_object(path / CONFIG).get("model_type")
    return kind if isinstance(kind, str) else None


def read_config(path: Path) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises UserError for another model type or a damaged file."""
    config, kind = read_json_object(path / CONFIG), model_type(path)
    if kind != MODEL_TYPE:
        raise UserError(f"{path / CONFIG} describes no model: its model_type is {kind!r}", CHECKPOINT)
    try:
        known = {ours: config[theirs] for ours, theirs in FIELDS.items() if theirs in config}
        return DecoderConfig(**known)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path / CONFIG} describes no model: {error}", CHECKPOINT) from None


def read_pretrained(path: Path) -> Pretrained:
    """Read a model that `save_pretrained` wrote. Raises UserError for another model type or a damaged folder."""
    decoder, config = read_config(path), read_json_object(path / CONFIG)
    length = config.get("max_position_embeddings")
    return Pretrained(decoder, _weights(path), length if type(length) is int and length > 0 else None, read_end(path))


def read_end(path: Path) -> int | None:
    """Return the id of the token that ends a text, the first if a folder names several; None if it names none."""
    generation = read_json_object(path / GENERATION) if (path / GENERATION).is_file() else {}
    ends = generation.get("eos_token_id", read_json_object(path / CONFIG).get("eos_token_id"))
    end = ends[0] if isinstance(ends, list) and ends else ends
    return end if type(end) is int and end >= 0 else None


def _weights(path: Path) -> dict[str, Tensor]:
    if (path / INDEX).is_file():
        places = read_json_object(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
            raise UserError(f"{path / INDEX} is damaged: it has no weight_map", CHECKPOINT)
        files = sorted(set(places.values()))
    elif (path / MODEL).is_file():
        files = [MODEL]
    else:
        what = "a folder with an adapter alone, or with pickled weights, cannot be used"
        raise UserError(f"{path} has neither {MODEL} nor {INDEX}: {what}", CHECKPOINT)
    tensors: dict[str, Tensor] = {}
    for name in files:
        try:
            tensors |= load_file(path / name)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{path / name} cannot be read as safetensors ({error})", CHECKPOINT) from error
    return {_own_name(name): tensor for name, tensor in tensors.items()}


def _own_name(name: str) -> str:
    return f"head.{name.removeprefix(HEAD)}" if name.startswith(HEAD) else name.removeprefix(BASE)
