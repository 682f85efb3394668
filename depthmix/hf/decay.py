"""Weight decay under Hugging Face's Trainer, whose grouping by parameter names does not cover mixers."""

from __future__ import annotations

from torch import nn

from depthmix.mixers.decay import decays


class PaperDecay:
    """Makes a Trainer decay the parameters that `depthmix.param_groups` does: matrices, and a mixer's as in its paper.

    It comes first among the bases, before Trainer or a subclass: `class MyTrainer(PaperDecay, Trainer): ...`.
    Unlike a custom optimizer, it also works if Trainer builds the optimizer after sharding, and it keeps Trainer's `optim` options.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """List the parameters that decay. Trainer calls this when it makes its optimizer."""
        return [name for name, applies in decays(model).items() if applies]
