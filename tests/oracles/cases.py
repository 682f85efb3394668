"""Option combinations worth trying, a list a mechanism."""

from itertools import product

from .defaults import DEFAULTS


def combine(**choices):
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


OPTIONS = {
    "residual": [{}],
    "rezero": [{}],
    "layerscale": [{}, {"init": 0.5}],
    "highway": combine(gate=["vector", "scalar"]),
    "denseformer": combine(dilation=[1, 2, 3, 9], period=[1, 2, 3, 9]),
    "hyper": combine(n=[1, 2, 4], static=[False, True], tanh=[True, False], norm=["layernorm", "rmsnorm"]),
    "mhc": combine(n=[2, 3], residual_map=["sinkhorn"], convention=["paper", "deepseek"], iterations=[1, 3, 20])
    + combine(residual_map=["birkhoff", "identity"], head=["sum", "mean", "learned"])
    + combine(convention=["paper", "deepseek"], head=["mean", "learned"])
    + combine(residual_map=["sinkhorn", "birkhoff", "identity"], init=["identity", "uniform", "symmetry"])
    + combine(schedule=["single_pass"], residual_map=["sinkhorn", "birkhoff", "identity"])
    + combine(schedule=["single_pass"], convention=["deepseek"], n=[2, 4]),
    "grn": combine(version=[1, 2, 3], window=[None, 1, 2, 9])
    + combine(window=[None, 2], relu_on=["dynamic", "sum"], w_per_entry=[False, True]),
    "dca": combine(window=[None, 1, 2], relu_on=["dynamic", "sum"], w_per_entry=[False, True]),
    "attnres": combine(block_size=[None, 1, 2, 3, 5, 8, 20], ways=[1, 3], window=[None, 1, 2])
    + combine(query=["learned", "input"], weights=["softmax", "sigmoid"], key_norm=[True, False], heads=[1, 2, 8])
    + combine(block_size=[None, 3], ways=[1, 3], query=["learned", "input"], routing=["replace", "add"], heads=[1, 4])
    + combine(block_size=[None, 3], ways=[1, 3], weights=["static"], window=[None, 2], routing=["replace", "add"]),
    "laurel": [{"variant": "rw"}, *combine(variant=["lr", "pa"], rank=[None, 2])],
    "mudd": [{}],
}


def complete(*names, keep=lambda name, options: True):
    """(name, complete options, id) of every combination, of all mechanisms or of the named ones."""
    for name in names or OPTIONS:
        for choice in OPTIONS[name]:
            options = DEFAULTS[name] | choice
            if keep(name, options):
                yield name, options, "-".join([name, *(f"{k}={v}" for k, v in choice.items())])
