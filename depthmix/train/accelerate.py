"""`depthmix accelerate`: compare a model of transformers that mixes over depth with itself on our operators.

The comparison is in fp32: logits, and gradients of all parameters. Timings follow in the precision of the command. Passes of both
take turns, so that other load on the machine meets both.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.config import AccelerateConfig
from depthmix.device import choose_device, device_name
from depthmix.errors import CHECKPOINT, INTERNAL, UserError
from depthmix.files import read_json_object
from depthmix.insight.summary import table
from depthmix.runs import foreign
from depthmix.runs.pretrained import CONFIG
from depthmix.values import check_at_least

TOLERANCE = 1e-3  # relative, in fp32: rounding stays far below, another rule far above
LAYERS, EXPERTS, VOCAB = 4, 8, 4096  # of a model with random weights
N_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts")
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
DEPTHS = ("num_hidden_layers", "depth")  # of a tower for images


def accelerate(config: AccelerateConfig) -> None:
    """Print the comparison as a table.

    Raises:
        UserError: The model cannot be used, or its results change.
    """
    check_at_least(config, 1, "layers", "experts", "tokens", "batch_size", "repeats")
    device = choose_device(config.device)
    foreign.need_transformers("accelerate")
    model, description = load(config)
    model = model.to(device).eval()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (config.batch_size, config.tokens), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    from depthmix.hf import accelerate as put_in
    from depthmix.hf import restore

    try:
        expected = results(model, ids)
        Timer(model, ids, device).measure()
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
        what = f"the model itself does not run ({str(error).strip().splitlines()[0]})"
        raise UserError(f"accelerate: {what}; try other --layers, --experts or --tokens", CHECKPOINT) from error
    put_in(model)
    found = results(model, ids)
    differences = [_difference(f, e) for f, e in zip(found, expected, strict=True)]
    del expected, found
    half = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    if half:
        to_bf16(model)
    after, before = Timer(model, ids, device), Timer(model, ids, device)
    for _ in range(config.repeats + 1):  # the first is a warm-up
        restore(model)
        before.measure()
        put_in(model, check=False, quiet=True)
        after.measure()
    print(f"{description}, {config.batch_size} x {config.tokens} tokens, on {device_name(device)}")
    rows = [
        ["largest difference of logits, fp32", "", f"{differences[0]:.1e}", ""],
        ["largest difference of a gradient, fp32", "", f"{differences[1]:.1e}", ""],
    ]
    precision = "bf16" if half else "fp32"
    for name in before.seconds:
        a, b = before.median(name), after.median(name)
        rows.append([f"{name}, {precision}, ms", f"{1e3 * a:.2f}", f"{1e3 * b:.2f}", f"{a / b:.2f}x"])
    if device.type == "cuda":
        gib = [timer.memory / 2**30 for timer in (before, after)]
        rows.append(
            [f"peak memory of training, {precision}, GiB", *(f"{g:.2f}" for g in gib), f"{gib[0] / gib[1]:.2f}x"]
        )
    print(table(["", "transformers", "accelerated", "gain"], rows))
    if not max(differences) <= TOLERANCE:
        what = f"the largest relative difference is {max(differences):.1e}, and rounding explains {TOLERANCE:.0e}"
        raise UserError(f"accelerate: the accelerated model gives other results: {what}", INTERNAL)


def load(config: AccelerateConfig) -> tuple[Any, str]:
    """Load the model in fp32, or build one with random weights from the configuration. Returns it and its description."""
    if not config.model:
        raise UserError("accelerate: model is missing: give a folder with config.json, or a config.json")
    path = Path(config.model)
    file = path if path.is_file() else path / CONFIG
    if not file.is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise UserError(f"accelerate: {path} {what}: give a folder of a model; nothing is fetched", CHECKPOINT)
    kind = read_json_object(file).get("model_type")
    weights = any(file.parent.glob("*.safetensors"))
    if weights and path.is_dir() and config.layers is None and config.experts is None:
        model = foreign.load(path, "accelerate", dtype=torch.float32)
        return model, f"{kind}, {model.config.get_text_config().num_hidden_layers} layers"
    return random_model(file, config)


def random_model(file: Path, given: AccelerateConfig) -> tuple[Any, str]:
    """Build a model with random weights: of real width, with few layers, few experts and a small vocabulary."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config: Any = AutoConfig.from_pretrained(file, local_files_only=True)
        fields = config.to_dict()
        text = fields["text_config"] if isinstance(fields.get("text_config"), dict) else fields
        described = _reduce(text, given.layers or LAYERS, given.experts or EXPERTS)
        for tower in (v for k, v in fields.items() if k.endswith("_config") and isinstance(v, dict) and v is not text):
            tower.update({name: 1 for name in DEPTHS if name in tower})
        config = type(config).from_dict(fields)
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM if type(config) in CAUSAL else AutoModelForImageTextToText
        model = auto.from_config(config, dtype=torch.float32)
    except UserError:
        raise
    # transformers and huggingface_hub's validation each raise their own types.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        why = " ".join(lines[: 1 + lines[0].endswith(":")])
        raise UserError(f"accelerate: {file} describes no model that transformers builds: {why}", CHECKPOINT) from None
    return model, f"{fields.get('model_type')}, random weights, {described}"


def _reduce(text: dict[str, Any], layers: int, experts: int) -> str:
    """Reduce the fields of a configuration, in place; returns what was left."""
    there = text.get("num_hidden_layers")
    if not isinstance(there, int) or "hidden_size" not in text:
        raise UserError("accelerate: the configuration has no num_hidden_layers and hidden_size", CHECKPOINT)
    layers = min(layers, there)
    by_layer = {name: value for name, value in text.items() if isinstance(value, list) and len(value) == there}
    kept = varied(by_layer.get("layer_types") or [None] * there, layers)
    text.update({name: [value[i] for i in kept] for name, value in by_layer.items()})
    text["num_hidden_layers"] = layers
    described = [f"width {text['hidden_size']}", f"{layers} of {there} layers"]
    for name in N_EXPERTS:
        if isinstance(text.get(name), int) and text[name] > experts:
            described.append(f"{experts} of {text[name]} experts")
            text[name] = experts
            text.update({group: 1 for group in ("n_group", "topk_group") if group in text})
            text.update({k: min(experts, text[k]) for k in CHOSEN_EXPERTS if isinstance(text.get(k), int)})
    if text.get("vocab_size", 0) > VOCAB:
        described.append(f"{VOCAB} of {text['vocab_size']} tokens")
        text["vocab_size"] = VOCAB
        text.update({name: None for name in TOKEN_IDS if name in text})
    return ", ".join(described)


def varied(kinds: list[Any], count: int) -> list[int]:
    """Choose `count` layers, in order: the first of each kind as far as there is room, then the first others.

    Some models do not run without one of their kinds. GLM-5-Next's caches need a layer of attention beside linear ones.
    """
    firsts = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:count]
    others = [i for i in range(len(kinds)) if i not in firsts]
    return sorted(firsts + others[: count - len(firsts)])


def to_bf16(model: Any) -> None:
    """Round weights as `from_pretrained(dtype=torch.bfloat16)` does: some modules stay in fp32, mixing among them."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = [re.compile(rf"(^|\.){re.escape(part)}(\.|$)") for part in names]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(part.search(name) for part in kept):
            tensor.data = tensor.data.to(torch.bfloat16)


def loss_of(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits, and the loss of predicting each next token."""
    logits = model(input_ids=ids, use_cache=False).logits
    return logits, functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def results(model: Any, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits and the gradients of all parameters, on the CPU."""
    logits, loss = loss_of(model, ids)
    loss.backward()
    gradients = [p.grad.cpu() if p.grad is not None else torch.zeros(()) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [logits.detach().cpu()], gradients


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its norm or, if that is small, to a thousandth of the largest."""
    norms = [e.norm() for e in expected]
    least = 1e-3 * max(norms).clamp(min=1e-30)
    worst = max(
        float((f - e).norm() / torch.maximum(norm, least)) for f, e, norm in zip(found, expected, norms, strict=True)
    )
    return worst if worst == worst else float("inf")


class Timer:
    """Time passes of a model, the first of each kind apart."""

    def __init__(self, model: Any, ids: Tensor, device: torch.device) -> None:
        self.model, self.ids, self.device = model, ids, device
        self.seconds: dict[str, list[float]] = {"training": [], "prefill": [], "decoding a token": []}
        self.memory = 0

    def measure(self) -> None:
        """Run every pass once."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._time("training", lambda: loss_of(self.model, self.ids)[1].backward())
        if self.device.type == "cuda":
            self.memory = torch.cuda.max_memory_allocated(self.device)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            cached = self._time("prefill", lambda: self.model(input_ids=self.ids, use_cache=True))
            past = cached.past_key_values
            self._time(
                "decoding a token",
                lambda: self.model(input_ids=self.ids[:, -1:], past_key_values=past, use_cache=True),
            )

    def median(self, name: str) -> float:
        """Return the median time of a pass without the first."""
        return statistics.median(self.seconds[name][1:])

    def _time(self, name: str, call: Callable[[], Any]) -> Any:
        self._wait()
        begun = time.perf_counter()
        result = call()
        self._wait()
        self.seconds[name].append(time.perf_counter() - begun)
        return result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
