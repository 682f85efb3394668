"""Use the transformers that `python -m benchmarks.carry_models` brought along. Import this before transformers."""

from benchmarks.carry_models import use_carried_models

use_carried_models()
