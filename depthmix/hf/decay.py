"""Weight decay under Hugging Face's Trainer, whose own grouping goes by names and knows no mixer."""

from __future__ import annotations

from torch import nn

from depthmix.mixers.decay import decays


class PaperDecay:
    """Makes a Trainer decay what `depthmix.param_groups` does: matrices, and in a mixer what its paper decays.

    It comes first among the bases, before Trainer or any class made of it: `class MyTrainer(PaperDecay, Trainer): ...`.
    Unlike an optimizer of one's own it also works where Trainer makes the optimizer after sharding, and keeps `optim` and the rest.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """List the parameters that decay. Trainer calls this when it makes its optimizer."""
        return [name for name, applies in decays(model).items() if applies]
