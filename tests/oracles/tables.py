"""What the tables at the top of an oracle are made of: option combinations and initial values."""

from itertools import product

import torch


def combine(**choices):
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def full(shape, value):
    return torch.full(shape, float(value), dtype=torch.float64)


def last_is_one(shape):
    value = full(shape, 0)
    value[..., -1] = 1.0
    return value


def one_hot_by_site(on, off):
    """[S, n]: `on` at stream s mod n, `off` elsewhere."""

    def build(shape):
        S, n = shape
        value = full(shape, off)
        for s in range(S):
            value[s, s % n] = on
        return value

    return build
