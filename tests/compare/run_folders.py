"""Finished run folders whose losses are known."""

import json
import math
from pathlib import Path


def write_run(path, losses, *, eval_every=100, tokens_per_step=10, step_seconds=0.5, seed=0, **result):
    """A finished run whose evaluations are the losses given, the last one at its last step."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    steps = result.pop("steps", eval_every * len(losses))
    lines = []
    for i, loss in enumerate(losses, 1):
        step = min(i * eval_every, steps)
        lines.append({"step": step, "tokens": step * tokens_per_step, "loss": loss, "lr": 0.1, "grad_norm": 1.0})
        lines.append({"step": step, "tokens": step * tokens_per_step, "val_loss": loss})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    final = losses[-1]
    values = {
        "mixer": "residual",
        "mixer_options": {},
        "seed": seed,
        "steps": steps,
        "tokens": steps * tokens_per_step,
        "val_loss": final,
        "perplexity": math.exp(final) if math.isfinite(final) else final,
        "bits_per_byte": final / 2,
        "parameters": {"mixer": 0, "total": 1000, "added_by_mixer": 0},
        "step_seconds": step_seconds,
        "seconds": steps * step_seconds + 7,
        "peak_memory": None,
        **result,
    }
    (path / "result.json").write_text(json.dumps(values))
    return path
