"""Inputs on which `check_rule` compares an implementation with an oracle, and the comparison.

Outputs of sublayers are fixed, so that an error at one site does not hide the next, and every read and the end count towards one
loss with random weights. Its gradients with respect to the embedding, every output and every parameter are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.testing.oracles.base import Oracle

# theirs(parameters, embedding, sublayer) -> the state after the last sublayer
Implementation = Callable[[dict[str, Tensor], Tensor, Callable[..., Tensor]], Tensor]

# Relative error of a tensor in fp32, and how many times the error of the oracle in fp32 are allowed: other orders of summation.
TIGHT, TIMES = 2e-4, 50.0
# Relative error in bf16: each of a site's few intermediate results may be rounded.
LOOSE = 4e-2
# Gradients far smaller than the largest of their kind are differences of large numbers.
FLOOR = 1e-4


class Case(NamedTuple):
    """An input: what it is called, its shape, and how large its numbers are."""

    name: str
    shape: tuple[int, int, int] = (2, 5, 32)  # batch, tokens, D
    dtype: torch.dtype = torch.float32
    scale: float = 1.0  # of activations
    spread: float = 0.4  # of parameters around their initial values
    kind: str = "random"  # or "ties", "initial", "saturated"


def cases(dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Case]:
    """Return the inputs: random and adversarial ones in fp32 at the first width, odd shapes, and the other dtypes."""
    dim = dims[0]
    found = [
        Case("random", (2, 5, dim)),
        Case("at its initial values", (2, 5, dim), kind="initial"),
        Case("ties", (2, 5, dim), kind="ties"),
        Case("large parameters", (2, 5, dim), spread=2.0),
        Case("closed gates", (2, 5, dim), kind="saturated"),
        Case("tiny activations", (2, 5, dim), scale=1e-3),
        Case("huge activations", (2, 5, dim), scale=1e4),
        *(Case(f"one token, D={d}", (1, 1, d)) for d in dims[1:]),
    ]
    found = found if torch.float32 in dtypes else []
    for dtype in dtypes:
        if dtype != torch.float32:
            found.append(Case(str(dtype).removeprefix("torch."), (2, 5, dim), dtype))
    return found


class Inputs(NamedTuple):
    """The numbers of a case, in the dtypes that an implementation receives."""

    parameters: dict[str, Tensor]
    embedding: Tensor
    outputs: list[Tensor]  # of the sublayers
    weights: list[Tensor]  # of reads and the end in the loss, three per read


class Results(NamedTuple):
    """Values and gradients of a run, by name, in fp64."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        """Return values and gradients."""
        return self.values | self.gradients


class WrongForm(Exception):
    """An implementation returned something of another form than the rule does."""


def make_inputs(oracle: Oracle, case: Case, seed: int) -> Inputs:
    """Return the numbers of a case. Parameters are fp32 or wider."""
    random = torch.Generator().manual_seed(seed)

    def normal(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    dim, sites = case.shape[-1], oracle.sites
    parameters = oracle.initial(dim)
    if case.kind != "initial":
        for name, value in parameters.items():
            noise = normal(value.shape) if value.ndim else normal((1,))[0]
            # A matrix's products have the size of one of its entries.
            size = case.spread / (value.shape[-2] ** 0.5 if value.ndim > 2 else 1.0)
            parameters[name] = value + (size if not name.startswith("alpha") or oracle.many_averages else 1.0) * noise
    if case.kind == "saturated":
        parameters = oracle.saturated(parameters)
    e = case.scale * normal(case.shape)
    outputs = [case.scale * normal(case.shape) for _ in range(sites)]
    if case.kind == "ties":
        outputs = [e.clone() for _ in range(sites)]
    weights = [normal(case.shape).to(case.dtype) for _ in range(3 * sites + 1)]
    return Inputs(
        {name: p.float() for name, p in parameters.items()},
        e.to(case.dtype),
        [y.to(case.dtype) for y in outputs],
        weights,
    )


def run(
    theirs: Implementation,
    inputs: Inputs,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    backward: bool = True,
) -> Results:
    """Run an implementation, with all inputs in a dtype if one is given, and with or without gradients.

    Raises:
        WrongForm: It calls its sublayers another number of times, or with other shapes.
    """
    sites = len(inputs.outputs)

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(device=device, dtype=dtype or x.dtype, copy=True).requires_grad_()

    parameters = {name: leaf(p) for name, p in inputs.parameters.items()}
    embedding, outputs = leaf(inputs.embedding), [leaf(y) for y in inputs.outputs]
    reads: list[tuple[Tensor, ...]] = []

    def sublayer(*read: Tensor) -> Tensor:
        """Note what is read, and return the next output, which the caller may change in place."""
        if len(reads) == sites:
            raise WrongForm(f"it calls more sublayers than {sites}")
        for h in read:
            if h.shape != embedding.shape:
                raise WrongForm(f"sublayer {len(reads)} reads {list(h.shape)} instead of {list(embedding.shape)}")
        reads.append(read)
        return outputs[len(reads) - 1].clone()

    with torch.set_grad_enabled(backward):
        end = theirs(parameters, embedding.clone(), sublayer)
    if len(reads) < sites:
        raise WrongForm(f"it calls {len(reads)} sublayers instead of {sites}")
    if not isinstance(end, Tensor) or end.shape != embedding.shape:
        raise WrongForm(f"it returns {_described(end)} instead of {list(embedding.shape)}")
    loss = torch.zeros((), dtype=torch.float64, device=device)
    values: dict[str, Tensor] = {}
    for s, read in enumerate(reads):
        # A read that queries, keys and values share counts for all three.
        for way in range(3):
            h = read[way] if len(read) == 3 else read[0]
            loss = loss + (h.double() * inputs.weights[3 * s + way].to(device).double()).sum()
            if len(read) == 3 or way == 0:
                names = ("queries", "keys", "values")
                values[f"read of sublayer {s}" + (f" for {names[way]}" if len(read) == 3 else "")] = h
    loss = loss + (end.double() * inputs.weights[-1].to(device).double()).sum()
    values["state at the end"] = end
    if not backward:
        return Results(_exact(values), {})
    leaves = {"embedding": embedding} | {f"output of sublayer {s}": y for s, y in enumerate(outputs)} | parameters
    grads: Sequence[Tensor | None] = (None,) * len(leaves)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        f"gradient of {name}": torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return Results(_exact(values), _exact(gradients))


def _exact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().double() for name, t in tensors.items()}


def _described(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def exact(oracle: Oracle, inputs: Inputs, backward: bool = True) -> Results:
    """Run an oracle in fp64."""
    return run(oracle.run, inputs, dtype=torch.float64, backward=backward)


def relative_tolerance(case: Case) -> float:
    """Return the error that a well-conditioned tensor of a case may have, relative to its norm."""
    return TIGHT if case.dtype == torch.float32 else LOOSE


def tolerances(oracle: Oracle, inputs: Inputs, right: Results, case: Case) -> dict[str, float]:
    """Return the difference, in the 2-norm, that each tensor of a case may have from the oracle's."""
    if case.dtype != torch.float32:
        return _with_floor(right, relative_tolerance(case))
    rough = run(oracle.run, inputs, dtype=torch.float32).all()
    allowed = _with_floor(right, relative_tolerance(case))
    return {name: bound + TIMES * float((rough[name] - right.all()[name]).norm()) for name, bound in allowed.items()}


def _with_floor(right: Results, relative: float) -> dict[str, float]:
    """Return a share of each tensor's norm. Gradients that nearly vanish count as a small share of the largest of their kind."""
    return {name: relative * norm for name, norm in norms(right, FLOOR).items()}


def norms(right: Results, floor: float) -> dict[str, float]:
    """Return every tensor's norm, at least a share of the largest one among reads, inputs' gradients or parameters' gradients."""
    found = {name: float(t.norm()) for name, t in right.all().items()}
    kind = {name: "value" if name in right.values else "input" if _is_input(name) else "parameter" for name in found}
    largest = {k: max(norm for name, norm in found.items() if kind[name] == k) for k in set(kind.values())}
    return {name: max(norm, floor * largest[kind[name]], 1e-30) for name, norm in found.items()}


def differences(found: Results, expected: Results, oracle: Oracle) -> dict[str, float]:
    """Return the difference of every tensor, in the 2-norm. Infinity where the forms or finiteness differ."""
    theirs, ours = found.all(), clipped(expected, found, oracle).all()
    out = {}
    for name, value in ours.items():
        if name not in theirs:
            out[name] = float("inf")
            continue
        difference = float((theirs[name] - value).norm())
        out[name] = difference if difference == difference else float("inf")
    return out | dict.fromkeys(theirs.keys() - ours.keys(), float("inf"))


def clipped(expected: Results, found: Results, oracle: Oracle) -> Results:
    """Cut the gradients of an oracle that cuts them, at the largest gradient that was found."""
    if not oracle.clipped:
        return expected
    kinds: dict[str, Callable[[str], bool]] = {
        "all": lambda name: True,
        "embedding": lambda name: name == "gradient of embedding",
        "inputs": _is_input,
        "parameters": lambda name: not _is_input(name),
    }
    cut = {name for name in expected.gradients if kinds[oracle.clipped](name)}
    limit = max((float(found.gradients[name].abs().max()) for name in cut if name in found.gradients), default=0.0)
    # Without any gradient, another mistake was made.
    if not limit > 0:
        return expected
    gradients = {name: g.clamp(-limit, limit) if name in cut else g for name, g in expected.gradients.items()}
    return Results(expected.values, gradients)


def _is_input(name: str) -> bool:
    return name == "gradient of embedding" or name.startswith("gradient of output of")
