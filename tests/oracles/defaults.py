"""Every option's default, as docs/mechanisms.md gives it."""

DEFAULTS = {
    "residual": {},
    "rezero": {},
    "layerscale": {"init": None},
    "highway": {"gate": "vector", "bias": -2.0},
    "denseformer": {"dilation": 1, "period": 1},
    "hyper": {"n": 4, "static": False, "tanh": True, "norm": "layernorm"},
    "mhc": {
        "n": 4,
        "residual_map": "sinkhorn",
        "convention": "paper",
        "iterations": 20,
        "head": "sum",
        "init": "identity",
        "schedule": "standard",
    },
    "grn": {"version": 3, "window": None, "relu_on": "dynamic", "w_per_entry": False},
    "dca": {"window": None, "relu_on": "dynamic", "w_per_entry": False},
    "attnres": {
        "block_size": None,
        "ways": 1,
        "query": "learned",
        "weights": "softmax",
        "key_norm": True,
        "heads": 1,
        "window": None,
        "routing": "replace",
        "eps": 1e-6,
    },
    "laurel": {"variant": "lr", "rank": None},
    "mudd": {},
}
