"""Documents with every field of docs/guides/inspecting.md, made up, and pages of them."""

import random

from depthmix.report.content import BETTER, BUSY, Content, Curve, Effect, Table

EVIL = "<script>alert('%{x}')</script><b>&amp;"


def document(
    label, blocks=2, ways=1, streams=0, edges=True, steps=(), signed=False, text=(), seed=0, names=("attention", "mlp")
):
    """Of a model with two sites in each block."""
    draw = random.Random(seed)
    kinds = [(name, block) for block in range(blocks) for name in names]
    readers = [{"name": n, "block": b, "ways": ways if n == names[0] else 1} for n, b in kinds]
    readers.append({"name": "finish", "block": blocks, "ways": 1})
    n = len(readers)

    def by_source(least=0.0, most=1.0):
        return [
            [[round(draw.uniform(least, most), 4) for _ in range(r + 1)] for _ in range(reader["ways"])]
            for r, reader in enumerate(readers)
        ]

    def by_way(most=2.0):
        return [[round(draw.uniform(0.5, most), 3) for _ in range(reader["ways"])] for reader in readers]

    def by_site(least=0.01):
        return [round(draw.uniform(least, 1.0), 4) for _ in kinds]

    def shares():
        """Rows that add up to one, as contributions do."""
        found = by_source(0.01)
        return [[[v / sum(row) for v in row] for row in ways] for ways in found]

    def predictions():
        return [
            {"token": f" {word}", "probability": 0.5 / 2**i} for i, word in enumerate(("sea", "sky", "deep", "is", "a"))
        ]

    def lens(t):
        actual = text[t + 1] if t + 1 < len(text) else ""
        return [
            {"token": actual if r == n - 1 else f" r{r}", "probability": 0.3, "next": 0.1 if actual else None}
            for r in range(n)
        ]

    def cuts(t):
        own = [[round(draw.uniform(-0.2, 1.0), 3) for _ in range(r + 1)] for r in range(n)]
        return own if t + 1 < len(text) else [[None] * (r + 1) for r in range(n)]

    least = -1.0 if signed else 0.0
    mean = by_source(least)
    spread = {"0.05": -0.2, "0.25": -0.1, "0.5": 0.0, "0.75": 0.1, "0.95": 0.2}
    quantiles = {q: [[[w + away for w in row] for row in own] for own in mean] for q, away in spread.items()}
    own_streams = {
        "similarity": [[[1.0 if i == j else 0.5 for j in range(streams)] for i in range(streams)] for _ in readers],
        "rms": [[1.0 + i for i in range(streams)] for _ in readers],
        **{name: by_site() for name in ("row_error", "column_error", "largest_row_error", "largest_column_error")},
        **{name: [[1.0, 1.1] for _ in kinds] for name in ("gain", "composite_gain")},
    }
    lines = [
        {"step": step, "input_rms": by_way(), "output_rms": by_site(), "gradient_norm": by_site()} for step in steps
    ]
    return {
        "schema": 2,
        "label": label,
        "run": f"runs/{seed}",
        "step": 100,
        "mixer": "some",
        "mixer_options": {},
        "parameters": {"total": 12345},
        "readers": readers,
        "sources": ["embedding", *(f"{name} {block}" for name, block in kinds)],
        "loss": 3.25,
        "mixing": {"tokens": 20000, "signed": signed, "mean": mean, "std": mean, "quantiles": quantiles}
        | {"contribution": shares(), "projection": shares()}
        | {name: by_way(float(n)) for name in ("entropy", "effective", "newest", "embedding")},
        "structure": [{"rank": 3, "semiseparable": 2, "most": 3}] * ways,
        "dynamics": {"tokens": 512, "input_rms": by_way(), "share": [0.1] * n}
        | {name: by_site() for name in ("output_rms", "gradient_norm")},
        "edges": {"tokens": 256, "loss": 3.25, "change": by_source(-0.01, 0.3)} if edges else None,
        "skips": {"tokens": 256, "loss": 3.25, "change": by_site()} if edges else None,
        "streams": own_streams if streams else None,
        "text": {
            "tokens": list(text),
            "losses": [None, *(round(draw.uniform(0.1, 9), 3) for _ in text[1:])],
            "weights": [by_source(least) for _ in text],
            "contributions": [shares() for _ in text],
            "predictions": [predictions() for _ in text],
            "lens": [lens(t) for t in range(len(text))],
            "cuts": [cuts(t) for t in range(len(text))] if edges else None,
        }
        if text
        else None,
        "training": lines,
    }


def curve(label, final, points=6):
    mean = [final + 0.4 * (points - 1 - i) for i in range(points)]
    tokens = [1000.0 * (i + 1) for i in range(points)]
    return Curve(label, tokens, [t / 50 for t in tokens], mean, [v - 0.02 for v in mean], [v + 0.02 for v in mean])


def content(labels, documents=(), **more):
    """A comparison's page, with a wide table."""
    columns = [f"column {i}" for i in range(14)]
    lines = [[label, *["1.2345 ± 0.0123"] * len(columns)] for label in labels]
    said = {
        "title": "Some ways compared",
        "verdict": [f"{label}: 0.1 nats below the first." for label in labels[1:]],
        "facts": [("data", "data/sotu")],
        "subtitle": "Two rules against plain.",
        "badge": "1 seed: a lead",
        "baseline": labels[0],
        "effects": [Effect(label, -0.1 + 0.07 * i, 0.05, 1.2, busy=i == 1) for i, label in enumerate(labels[1:])],
        "tables": [Table("", ["arm", *columns], lines, {(1, 1): BETTER, (1, 2): BUSY})],
        "notes": ["A note."],
        "reading": ["Lower is better."],
        "curves": [curve(label, 4.0 + 0.001 * i) for i, label in enumerate(labels)],
        "samples": [{"arm": labels[-1], "prompt": "Once", "text": "Once upon a time"}],
        "recipe": "steps: 100",
        "environment": [("torch", "2.13")],
        "command": "depthmix report runs/a",
    }
    return Content(**{**said, "documents": documents, **more})
