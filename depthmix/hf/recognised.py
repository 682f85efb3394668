"""Recognise pre-norm decoders that nobody has registered: by the names of their modules, and by what their layers compute.

    x1 = x + attention(norm(x));   x2 = x1 + mlp(norm(x1))

A few tokens run through the model. Hooks compare what its norms receive and its layers return with these sums.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.hf.architectures import ARCHITECTURES, LLAMA, plain_type
from depthmix.hf.retrofitted import register_architecture

TOKENS = 8
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest number; others: half precision
HALF = 3e-2


def why_not_recognised(model: Any) -> str | None:
    """Explain why a model is not a pre-norm decoder with the layout of Llama; None if it is.

    If it is, its model type is registered: `retrofit` and, in this process, `from_pretrained` know it from then on.
    """
    kind = plain_type(model.config)
    known = f"the architecture {kind!r} is not known (known are {', '.join(sorted(ARCHITECTURES))})"
    reason = _why_not_named(model) or _why_not_sums(model)
    if reason is not None:
        return f"{known}, and not recognised as a pre-norm decoder: {reason}"
    projections = LLAMA.projections
    attentions = [
        getattr(layer, site.sublayer) for layer in model.base_model.layers for site in LLAMA.sites if site.attention
    ]
    if not all(
        isinstance(getattr(attention, name, None), nn.Linear) for attention in attentions for name in projections
    ):
        projections = ()
    register_architecture(kind, LLAMA._replace(projections=projections))
    return None


def _why_not_named(model: Any) -> str | None:
    base = model.base_model
    layers: Any = getattr(base, LLAMA.layers, None)
    if not isinstance(layers, nn.ModuleList) or not len(layers) or not hasattr(base, LLAMA.final_norm):
        return f"it has no {LLAMA.layers} and {LLAMA.final_norm}"
    names = {name for site in LLAMA.sites for name in (site.norm, site.sublayer)}
    for layer in layers:
        missing = [name for name in sorted(names) if not hasattr(layer, name)]
        if missing:
            return f"a layer has no {missing[0]}"
        more = [
            name
            for name, child in layer.named_children()
            if name not in names and any(True for _ in child.parameters())
        ]
        if more:
            return f"a layer also has {more[0]}"
    return None


@torch.no_grad()
def _why_not_sums(model: Any) -> str | None:
    """Compare what layers compute with the sums of a pre-norm decoder, on random tokens."""
    weight = model.get_input_embeddings().weight
    if weight.device.type == "meta":
        return "it has no weights to compare its layers with; load them, or register the architecture"
    seen: dict[tuple[int, str], Any] = {}
    layers, final_norm = model.base_model.layers, getattr(model.base_model, LLAMA.final_norm)

    def received(key: Any) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            seen[key] = args[0] if args else kwargs.get("hidden_states")

        return hook

    def returned(key: Any) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            seen[key] = out

        return hook

    ids = torch.randint(len(weight), (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(weight.device)
    training = model.training
    with ExitStack() as hooks:
        for i, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(received((i, "x")), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(returned((i, "layer"))).remove)
            for site in LLAMA.sites:
                norm, sublayer = getattr(layer, site.norm), getattr(layer, site.sublayer)
                hooks.callback(norm.register_forward_pre_hook(received((i, site.norm)), with_kwargs=True).remove)
                hooks.callback(
                    sublayer.register_forward_pre_hook(received((i, f"{site.sublayer} in")), with_kwargs=True).remove
                )
                hooks.callback(norm.register_forward_hook(returned((i, f"{site.norm} out"))).remove)
                hooks.callback(sublayer.register_forward_hook(returned((i, site.sublayer))).remove)
        hooks.callback(final_norm.register_forward_pre_hook(received((len(layers), "x")), with_kwargs=True).remove)
        try:
            model.eval()(input_ids=ids)
        except (RuntimeError, ValueError, TypeError) as error:
            return f"it does not run on token ids alone ({str(error).strip().splitlines()[0]})"
        finally:
            model.train(training)
    for i in range(len(layers)):
        x = seen.get((i, "x"))
        if not isinstance(seen.get((i, "layer")), Tensor) or not isinstance(x, Tensor):
            return "its layers do not map one tensor to one"
        for site in LLAMA.sites:
            reason = _differs(f"layer {i}: {site.norm} receives", seen.get((i, site.norm)), "the stream", x)
            reason = reason or _differs(
                f"layer {i}: {site.sublayer} receives",
                seen.get((i, f"{site.sublayer} in")),
                f"what {site.norm} returns",
                seen.get((i, f"{site.norm} out")),
            )
            if reason:
                return reason
            y = seen[i, site.sublayer]
            x = x + (y[0] if isinstance(y, tuple) else y).to(x.device)
        reason = _differs(f"layer {i} returns", seen[i, "layer"], "x + attention + MLP", x)
        reason = reason or _differs(
            f"after layer {i} comes", seen.get((i + 1, "x")), "what it returns", seen[i, "layer"]
        )
        if reason:
            return reason
    return None


def _differs(what: str, found: Any, expected_name: str, expected: Any) -> str | None:
    """Say by how much a tensor differs from the expected one; None if rounding explains it."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return f"{what} something else than {expected_name}"
    size = expected.float().abs().max().clamp(min=1e-30)
    difference = ((found.to(expected.device).float() - expected.float()).abs().max() / size).item()
    if difference <= ROUNDING.get(expected.dtype, HALF):
        return None
    return f"{what} something else than {expected_name}: they differ by {difference:.1e} of the largest number"
