"""`depthmix.plot_depth_map`: what a model's sites read from each other, drawn with matplotlib."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix.errors import UserError
from depthmix.insight.document import describe_mixer, of_depth_map
from depthmix.insight.maps import depth_map
from depthmix.insight.mixing import choose_mixer
from depthmix.mixers import Mixer
from depthmix.models.with_mixer import with_mixer


def plot_depth_map(
    model: nn.Module,
    ids: Any,
    *,
    ax: Any = None,
    way: int = 0,
    values: Literal["contribution", "weight"] = "contribution",
    mixer: Mixer | str | None = None,
    colorbar: bool = True,
) -> Any:
    """Draw which sources every site reads, averaged over the tokens of a batch.

    Args:
        model: Any model with a mixer: a `Decoder`, a `Vit`, a retrofitted model, or one of your own.
        ids: Tokens [T] or [B, T], as a list, array or tensor. For a model that takes no tokens, its input tensor.
        ax: matplotlib axes to draw on. By default a new figure.
        way: Which mixture of attention, where a rule has several (queries, keys, values).
        values: `contribution` draws each source's share of the sizes of what sources add to a read. `weight` draws the
            depth-mixing matrix, which does not count how large sources are.
        mixer: Which mixer of a model with several: the module or its name in the model.
        colorbar: Draw a colour bar beside the axes.

    Returns:
        The axes, with readers downwards and sources to the right.

    Raises:
        UserError: matplotlib is not installed, or there is no such way or no such value.

    Examples:
        >>> ax = depthmix.plot_depth_map(result["attnres"].model, data.tokenizer.encode("My fellow").ids)
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UserError("matplotlib is not installed, and figures need it: pip install matplotlib") from None
    from depthmix.report.depth_figures import COLOURS, draw_map
    from depthmix.report.documents import way_names

    if values not in COLOURS:
        raise UserError(f"plot_depth_map: values must be 'contribution' or 'weight', got {values!r}")
    model = with_mixer(model)
    chosen = choose_mixer(model, mixer)
    found = depth_map(model, [_batch(model, ids)], chosen)
    document = {**describe_mixer(chosen), "mixing": of_depth_map(chosen, found)}
    names = way_names(document)
    if not 0 <= way < len(names):
        raise UserError(f"plot_depth_map: there is no way {way}; this mixer has {len(names)}, counted from 0")
    if ax is None:
        size = 2.2 + 0.19 * len(document["readers"])
        _, ax = pyplot.subplots(figsize=(size + 0.6, size), layout="constrained")
    shown = draw_map(ax, document, way, values)
    ax.set_title(names[way], fontsize=10.5)
    ax.set_xlabel("source")
    ax.set_ylabel("reader")
    if colorbar:
        ax.figure.colorbar(shown, ax=ax, shrink=0.8, label=COLOURS[values])
    return ax


def _batch(model: nn.Module, ids: Any) -> Tensor:
    """Return the input on the model's device; one sequence of tokens becomes a batch of one."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = torch.as_tensor(ids, device=device)
    return batch[None] if batch.ndim == 1 else batch
