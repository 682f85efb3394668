"""Look into the trained models of a comparison: samples of text, and what their layers read from each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from depthmix.compare.rows import Run
from depthmix.config import InspectConfig
from depthmix.errors import UserError
from depthmix.report.measure import measured, opening_text

if TYPE_CHECKING:
    from depthmix.compare.engine import Comparison

TEMPERATURE, TOP_P = 0.8, 0.95
# Tokens that the depth maps of the report are measured on.
MAP_TOKENS = 2048
# Seconds that cutting connections may take for all arms together. `depthmix report` takes its time.
CUTTING = 3.0


def make_samples(comparison: Comparison) -> None:
    """Let every arm's first model continue the prompt, and record the text. Samples made before are kept."""
    config = comparison.recipe.config
    if not config.prompt:
        return
    from depthmix.train.generate import generate_text

    known = {sample["arm"]: sample["run"] for sample in comparison.results.samples}
    for label, run in comparison.results.first_runs():
        folder = Path(run.path).relative_to(comparison.path).as_posix() if run.path else ""
        if folder and known.get(label) != folder:
            text = generate_text(Path(run.path), config.prompt, config.sample_tokens, TEMPERATURE, TOP_P, 0)
            line = {"kind": "sample", "arm": label, "run": folder, "prompt": config.prompt}
            comparison.records.add({**line, "tokens": config.sample_tokens, "text": text})


def look_inside(comparison: Comparison) -> None:
    """Inspect every arm's first saved model on few tokens. A model that cannot be inspected gives a note."""
    config = comparison.recipe.config
    firsts = [(label, run) for label, run in comparison.results.first_runs() if run.path]
    comparison.documents, comparison.not_inspected = [], []
    for label, run in firsts:
        tokens = affordable_tokens(run, config.n_blocks, config.batch_size * config.seq_len, CUTTING / len(firsts))
        inspection = InspectConfig(run.path, text=opening_text(run.path), tokens=MAP_TOKENS, device=config.device)
        # At least one sequence.
        inspection.causal_tokens = tokens if tokens >= config.seq_len else 0
        try:
            document = measured(inspection)
        # Such as out of memory. It must not cost the comparison its results.
        except (UserError, RuntimeError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            comparison.not_inspected.append(f"What is inside {label} is not shown: {reason[0]}")
            continue
        comparison.documents.append({**document, "label": label})


def affordable_tokens(run: Run, n_blocks: int, tokens: int, seconds: float) -> int:
    """Return the number of tokens on which all connections can be cut within some seconds.

    A cut at reader r runs everything after it once more for each of its r + 1 sources. Ways and overheads come on top.

    Args:
        run: A run, whose step time tells the speed.
        n_blocks: Blocks of its model.
        tokens: Tokens of a step.
        seconds: The time.
    """
    sites = 2 * n_blocks
    passes = sum((r + 1) * (sites + 1 - r) for r in range(sites + 1)) / sites
    forward = run.step_seconds / 3 / tokens
    return min(4096, int(seconds / (3 * passes * forward)))
