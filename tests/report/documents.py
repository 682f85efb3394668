"""Documents with weights that can be recognised, and a page that holds them."""

import random

from depthmix.report.explorer import EXPLORER_SCRIPT, EXPLORER_STYLE, explorer

PLAIN = (
    ":root { color-scheme: light dark; --ink: #1f2428; --soft: #57606a; --page: #fff; --card: #f5f7f9; --line: #d5dbe1 }"
    "@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa5b1; --page: #14181c; --card: #1d2328; --line: #353d45 } }"
    "body { background: var(--page); color: var(--ink); font: 16px/1.5 sans-serif }"
)


def document(tokens, label="", blocks=2, ways=1, seed=0, least=0.0):
    """The fields that the explorer reads, of a model with attention and an MLP in each block."""
    draw = random.Random(seed)
    kinds = [(name, block) for block in range(blocks) for name in ("attention", "mlp")]
    readers = [{"name": n, "block": b, "ways": ways if n == "attention" else 1} for n, b in kinds]
    readers.append({"name": "finish", "block": blocks, "ways": 1})

    def weights():
        return [
            [[round(draw.uniform(least, 1), 4) for _ in range(r + 1)] for _ in range(reader["ways"])]
            for r, reader in enumerate(readers)
        ]

    losses = [None, *(round(draw.uniform(0, 9), 3) for _ in tokens[1:])]
    return {
        "run": f"runs/{seed}",
        "mixer": "some",
        "mixer_options": {"n": seed},
        **({"label": label} if label else {}),
        "readers": readers,
        "sources": ["embedding", *(f"{name} {block}" for name, block in kinds)],
        "mixing": {"tokens": 20000, "mean": weights()},
        "text": {"tokens": list(tokens), "losses": losses, "weights": [weights() for _ in tokens]},
    }


def write_page(path, documents):
    head = f'<meta charset="utf-8"><title>t</title><style>{PLAIN}{EXPLORER_STYLE}</style>'
    body = f"{explorer(documents)}<script>{EXPLORER_SCRIPT}</script>"
    path.write_text(f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>', encoding="utf-8")
    return path
