"""`depthmix.plot_depth_map`: the depth-mixing matrix of a model, drawn with matplotlib."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthmix.errors import UserError
from depthmix.insight.document import by_reader, describe_mixer
from depthmix.insight.mixing import choose_mixer, depth_mixing
from depthmix.mixers import Mixer


def plot_depth_map(
    model: nn.Module,
    ids: Any,
    *,
    ax: Any = None,
    way: int = 0,
    mixer: Mixer | str | None = None,
    colorbar: bool = True,
) -> Any:
    """Draw which sources every site reads, averaged over the tokens of a batch.

    Args:
        model: Any model with a mixer: a `Decoder`, a `Vit`, a retrofitted model, or one of your own.
        ids: Tokens [T] or [B, T], as a list, array or tensor. For a model that takes no tokens, its input tensor.
        ax: matplotlib axes to draw on. By default a new figure.
        way: Which mixture of attention, where a rule has several (queries, keys, values).
        mixer: Which mixer of a model with several: the module or its name in the model.
        colorbar: Draw a colour bar beside the axes.

    Returns:
        The axes, with readers downwards and sources to the right.

    Raises:
        UserError: matplotlib is not installed, or there is no such way.

    Examples:
        >>> ax = depthmix.plot_depth_map(result["attnres"].model, data.tokenizer.encode("My fellow").ids)
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UserError("matplotlib is not installed, and figures need it: pip install matplotlib") from None
    from depthmix.report.depth_figures import draw_map
    from depthmix.report.documents import way_names

    chosen = choose_mixer(model, mixer)
    document = _document(chosen, depth_mixing(model, _batch(model, ids), mixer=chosen))
    names = way_names(document)
    if not 0 <= way < len(names):
        raise UserError(f"plot_depth_map: there is no way {way}; this mixer has {len(names)}, counted from 0")
    if ax is None:
        size = 2.2 + 0.19 * len(document["readers"])
        _, ax = pyplot.subplots(figsize=(size + 0.6, size), layout="constrained")
    shown = draw_map(ax, document, way)
    ax.set_title(names[way], fontsize=10.5)
    ax.set_xlabel("source")
    ax.set_ylabel("reader")
    if colorbar:
        ax.figure.colorbar(shown, ax=ax, shrink=0.8, label="weight")
    return ax


def _document(mixer: Mixer, m: Tensor) -> dict[str, Any]:
    """Return the part of `depthmix inspect`'s document that the figure needs, from the matrix m [W, S+1, S+1]."""
    return {**describe_mixer(mixer), "mixing": {"mean": by_reader(mixer, m), "signed": bool((m < 0).any())}}


def _batch(model: nn.Module, ids: Any) -> Tensor:
    """Return the input on the model's device; one sequence of tokens becomes a batch of one."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = torch.as_tensor(ids, device=device)
    return batch[None] if batch.ndim == 1 else batch
