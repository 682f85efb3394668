"""Checks of the contract that every mixer keeps, one function per promise, on the CPU and on small inputs.

A check receives a copy of the mixer, which it may change. It raises `CheckFailed` with the problem, or `NotApplicable`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.insight.contributions import contributions
from depthmix.mixers import Mixer
from depthmix.mixers.leaks import find_leak
from depthmix.mixers.trial import stir
from depthmix.ops.torch_internals import pytree
from depthmix.parallel.packing import pack_state, state_forms, unpack_state
from depthmix.parallel.row_owners import blank_foreign, row_owners, why_not_divided

ROWS, TOKENS = 2, 5
# Tolerance in fp64, where two ways of computing the same may round differently.
EXACT = 1e-9
# Steps of finite differences in fp64. The second is for a rule with a kink nearby, such as a relu.
STEPS = (1e-5, 1e-7)
# Relative error that finite differences may have.
CLOSE = 1e-5


class CheckFailed(AssertionError):
    """Error for a mixer that breaks a promise. The message says which promise and where."""


class NotApplicable(Exception):
    """Error for a check that does not apply to a mixer. The message says why."""


def check_contract(mixer: Mixer) -> None:
    """Run one fp32 pass, with and without norms, over all tokens and over the last ones."""
    _stir(mixer)
    mixer.float()
    x = _sources(mixer)[0].float()
    norms = [nn.RMSNorm(mixer.dim) for _ in range(3)]
    state = mixer.start(x)
    for site in range(mixer.n_sites):
        reads = _as_tuple(mixer.read(state, site))
        normed = _as_tuple(mixer.read(state, site, norms[: mixer.ways(site)]))
        for way, (h, n) in enumerate(zip(reads, normed, strict=True)):
            where = f"read at site {site}, way {way},"
            _expect_like(h, x, where)
            _expect_like(n, x, f"{where} with its norm")
            _expect_equal(n, norms[way](h), f"{where} with its norm is not the norm of the read", 1e-4)
        state = mixer.write(state, site, torch.sin(reads[0]))
    out = mixer.finish(state)
    _expect_like(out, x, "finish")
    _expect_equal(mixer.finish(state, last=2), out[..., -2:, :], "finish(last=2) is not the end of finish", 1e-5)


def check_states(mixer: Mixer) -> None:
    """Check that a state is a value: reading and writing leave it and their inputs unchanged, and two passes are independent."""
    _stir(mixer)
    sources = _sources(mixer)
    originals = [source.clone() for source in sources]
    state = mixer.start(sources[0])
    for site in range(mixer.n_sites):
        leaves, spec = pytree.tree_flatten(state)
        if not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
            raise CheckFailed(f"the state before site {site} holds something that is not a tensor")
        before = [None if leaf is None else leaf.detach().clone() for leaf in leaves]
        without_read = mixer.write(pytree.tree_unflatten(leaves, spec), site, sources[site + 1])
        mixer.read(state, site)
        first = mixer.write(state, site, sources[site + 1])
        second = mixer.write(state, site, sources[site + 1])
        for leaf, leaf_before in zip(leaves, before, strict=True):
            if leaf is not None and leaf_before is not None and not torch.equal(leaf, leaf_before):
                raise CheckFailed(f"read or write at site {site} changes the state that it is given")
        for other, manner in ((without_read, "without its read"), (second, "a second time")):
            for a, b in zip(_tensors(first), _tensors(other), strict=True):
                _expect_equal(a, b, f"write at site {site} gives another state {manner}")
        state = second
    mixer.finish(state)
    if not all(torch.equal(a, b) for a, b in zip(sources, originals, strict=True)):
        raise CheckFailed("a tensor that was passed in has been changed")
    others = _sources(mixer, seed=1)
    expected = [_replay(mixer, of_pass)[-1][0] for of_pass in (sources, others)]
    states = [mixer.start(of_pass[0]) for of_pass in (sources, others)]
    for site in range(mixer.n_sites):
        for state in states:
            mixer.read(state, site)
        states = [mixer.write(s, site, of_pass[site + 1]) for s, of_pass in zip(states, (sources, others), strict=True)]
    for state, out in zip(states, expected, strict=True):
        _expect_equal(
            mixer.finish(state), out, "two passes at a time disturb each other: something is kept outside the state"
        )


def check_causality(mixer: Mixer) -> None:
    """Check that nothing depends on later tokens or on other rows of the batch."""
    if (leak := find_leak(mixer, tokens_too=True)) is not None:
        raise CheckFailed(leak)


def check_locality(mixer: Mixer) -> None:
    """Check that a rule mixes every token by itself: only the last dimension of its inputs has a meaning."""
    _stir(mixer)
    sources = _sources(mixer)
    flat = [source.reshape(-1, mixer.dim) for source in sources]
    for site, (batched, unbatched) in enumerate(zip(_replay(mixer, sources), _replay(mixer, flat), strict=True)):
        for h, f in zip(batched, unbatched, strict=True):
            _expect_equal(h.reshape(-1, mixer.dim), f, f"{_reader(mixer, site)} of tokens without a batch differs")


def check_inference(mixer: Mixer) -> None:
    """Check that a pass under no_grad reads the same as a pass in training."""
    _stir(mixer)
    sources = _sources(mixer)
    trained = _replay(mixer, sources)
    with torch.no_grad():
        inferred = _replay(mixer, sources)
    for site, (in_training, in_inference) in enumerate(zip(trained, inferred, strict=True)):
        for h, f in zip(in_training, in_inference, strict=True):
            _expect_equal(h, f, f"{_reader(mixer, site)} under no_grad differs from training")


def check_gradients(mixer: Mixer) -> None:
    """Check autograd against finite differences in fp64, for the embedding, every output and every parameter."""
    _stir(mixer)
    random = torch.Generator().manual_seed(1)
    sources = [source.requires_grad_() for source in _sources(mixer)]
    weights = [
        [torch.randn(h.shape, generator=random, dtype=h.dtype) for h in of_read] for of_read in _replay(mixer, sources)
    ]

    def value() -> Tensor:
        """Sum all reads with random weights, so that every gradient counts."""
        weighted_reads = zip(weights, _replay(mixer, sources), strict=True)
        return torch.stack([(w * h).sum() for of_read in weighted_reads for w, h in zip(*of_read, strict=True)]).sum()

    named = {"the embedding": sources[0]} | {f"the output of site {i}": y for i, y in enumerate(sources[1:])}
    parameters = {f"parameter {name}": p for name, p in mixer.named_parameters() if p.requires_grad}
    named |= parameters
    total = value()
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for (name, leaf), gradient in zip(named.items(), gradients, strict=True):
        direction = torch.randn(leaf.shape, generator=random, dtype=leaf.dtype)
        derivative = 0.0 if gradient is None else float((gradient * direction).sum())
        expected = [_difference(value, leaf, direction, step) for step in STEPS]
        if not any(
            abs(derivative - e) <= CLOSE * max(abs(derivative), abs(e), abs(float(total.detach())), 1.0)
            for e in expected
        ):
            comparison = f"{derivative:.6g} along a random direction, where finite differences give {expected[0]:.6g}"
            raise CheckFailed(f"the gradient of {name} is {comparison}")
        if name in parameters and gradient is None:
            raise CheckFailed(f"{name} receives no gradient and changes nothing")


def _difference(value: Callable[[], Tensor], leaf: Tensor, direction: Tensor, step: float) -> float:
    """Return the central difference of a value along a direction of a leaf, whose value is restored."""
    original, values = leaf.detach().clone(), []
    with torch.no_grad():
        for side in (1, -1):
            leaf.copy_(original + side * step * direction)
            values.append(float(value()))
        leaf.copy_(original)
    return (values[0] - values[1]) / (2 * step)


def check_precision(mixer: Mixer) -> None:
    """Check that bf16 is within rounding of fp32: a mixture rounds once, a stream once per write."""
    _stir(mixer)
    mixer.float()
    sources = [source.bfloat16() for source in _sources(mixer)]
    wide = _replay(mixer, [source.float() for source in sources])
    for site, (rounded, references) in enumerate(zip(_replay(mixer, sources), wide, strict=True)):
        for h, reference in zip(rounded, references, strict=True):
            if h.dtype != torch.bfloat16:
                raise CheckFailed(f"{_reader(mixer, site)} of bf16 sources is {h.dtype}")
            bound = 2**-8 * (site + 1) * max(1.0, float(reference.detach().abs().max()))
            error = float((h.float() - reference).detach().abs().max())
            if not error <= bound:
                raise CheckFailed(
                    f"{_reader(mixer, site)} in bf16 is off by {error:.3g}, more than rounding ({bound:.3g})"
                )


def check_parameters(mixer: Mixer) -> None:
    """Check that `reset_parameters` sets every parameter, and that casting a model to half precision leaves them in fp32."""
    with torch.no_grad():
        for p in mixer.parameters():
            p.fill_(torch.nan)
    mixer.reset_parameters()
    for name, p in mixer.named_parameters():
        if bool(p.isnan().any()):
            raise CheckFailed(f"parameter {name} is not set by reset_parameters()")
    for name, p in mixer.bfloat16().named_parameters():
        if p.dtype not in (torch.float32, torch.float64):
            raise CheckFailed(f"parameter {name} becomes {p.dtype} under .bfloat16()")


def check_copies(mixer: Mixer) -> None:
    """Check that a deep copy, and a copy that has loaded the state dict, compute the same."""
    _stir(mixer)
    sources, twin, loaded = _sources(mixer), copy.deepcopy(mixer), copy.deepcopy(mixer)
    expected = _replay(mixer, sources)
    with torch.no_grad():
        for p in loaded.parameters():
            p.zero_()
        # The copy may cache values computed from its parameters: these must follow when new parameters are loaded.
        _replay(loaded, sources)
    loaded.load_state_dict(mixer.state_dict())
    for other, name in ((twin, "a deep copy"), (loaded, "a copy that loads its state dict")):
        for of_original, of_copy in zip(expected, _replay(other, sources), strict=True):
            for a, b in zip(of_original, of_copy, strict=True):
                _expect_equal(a, b, f"{name} computes something else", 0.0)


def check_contributions(mixer: Mixer) -> None:
    """Check that the contributions of a read's sources add up to the read. `depth_mixing` and `depthmix inspect` rely on it."""
    _stir(mixer)
    sources = _sources(mixer)
    with torch.no_grad():
        reads = _replay(mixer, sources)
    for site, results in enumerate(reads):
        for h, (parts, _) in zip(results, contributions(mixer, sources[: site + 1]), strict=True):
            message = (
                f"the parts of {_reader(mixer, site)} do not add up to it: take coefficients from state.observe(x)"
            )
            _expect_equal(parts.sum(0), h, message)


def check_pipeline(mixer: Mixer) -> None:
    """Check that two pipeline stages, each with the parameters of its own sites, compute what the whole computes."""
    if mixer.n_sites < 2:
        raise NotApplicable("a mixer of one site cannot be divided")
    if (reason := why_not_divided(mixer)) is not None:
        raise NotApplicable(reason)
    _stir(mixer)
    half, sources = mixer.n_sites // 2, _sources(mixer)
    with torch.no_grad():
        expected = _replay(mixer, sources)
        (form,), owners = state_forms(mixer, [half], sources[0].dtype), row_owners(mixer)
        first, second = copy.deepcopy(mixer), copy.deepcopy(mixer)
        blank_foreign(first, owners, range(half))
        blank_foreign(second, owners, range(half, mixer.n_sites + 1))
        state: Any = first.start(sources[0])
        for site in range(mixer.n_sites):
            if site == half:
                state = unpack_state(form, pack_state(first, state))
            stage = first if site < half else second
            for result, whole in zip(_as_tuple(stage.read(state, site)), expected[site], strict=True):
                _expect_equal(result, whole, f"{_reader(mixer, site)} in its stage differs from the whole")
            state = stage.write(state, site, sources[site + 1])
        _expect_equal(second.finish(state), expected[-1][0], "finish in the last stage differs from the whole")


CHECKS: dict[str, Callable[[Mixer], None]] = {
    "contract": check_contract,
    "states": check_states,
    "causality": check_causality,
    "locality": check_locality,
    "inference": check_inference,
    "gradients": check_gradients,
    "precision": check_precision,
    "parameters": check_parameters,
    "copies": check_copies,
    "contributions": check_contributions,
    "pipeline": check_pipeline,
}


def _stir(mixer: Mixer) -> None:
    """Move every parameter, in fp64, away from its initial value, so that rules that start as plain residuals differ from them."""
    stir(mixer, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in mixer.parameters():
            # Memory that was never set has a check of its own.
            p.nan_to_num_()


def _sources(mixer: Mixer, seed: int = 0) -> list[Tensor]:
    """Return an embedding and an output for every site: [ROWS, TOKENS, D] each."""
    random = torch.Generator().manual_seed(seed)
    shape = (ROWS, TOKENS, mixer.dim)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(mixer.n_sites + 1)]


def _replay(mixer: Mixer, sources: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the results of every read, with finish as the last, for given outputs of the sublayers."""
    state, reads = mixer.start(sources[0]), []
    for site in range(mixer.n_sites):
        reads.append(_as_tuple(mixer.read(state, site)))
        state = mixer.write(state, site, sources[site + 1])
    return [*reads, (mixer.finish(state),)]


def _as_tuple(h: Any) -> tuple[Tensor, ...]:
    return h if isinstance(h, tuple) else (h,)


def _tensors(state: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def _reader(mixer: Mixer, site: int) -> str:
    return "finish" if site == mixer.n_sites else f"the read at site {site}"


def _expect_like(h: Any, x: Tensor, what: str) -> None:
    if not isinstance(h, Tensor) or h.shape != x.shape or h.dtype != x.dtype:
        got = f"{h.dtype} of shape {list(h.shape)}" if isinstance(h, Tensor) else type(h).__name__
        raise CheckFailed(f"{what} gives {got}, where {x.dtype} of shape {list(x.shape)} goes in")


def _expect_equal(a: Tensor, b: Tensor, what: str, tolerance: float = EXACT) -> None:
    if a.shape != b.shape or not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
        off = f" by {float((a - b).detach().abs().max()):.3g}" if a.shape == b.shape and a.numel() else ""
        raise CheckFailed(what + (f" (off{off})" if off else ""))
