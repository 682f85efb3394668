"""Kernels with matrix products keep the pipeline settings with which they do not race.

Triton 3.6 pipelines the load of a tile that a Hopper matrix product reads. If the kernel also reads the tile into registers, the next
load overwrites shared memory that another warp group's product still reads (lab/LOG.md, 2026-11-16; Triton issue 6691). Three kernels
raced that way, and only on a GPU. They keep one stage. A GPU test cannot show that there is no race, so the settings are held here.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from depthmix.ops.depth_attention.kernels import tiling
from depthmix.ops.depth_sum.kernels import coefficients, scores
from depthmix.ops.gated_streams.kernels import few_tokens
from depthmix.ops.gated_streams.reference import Inputs
from depthmix.ops.stream_mix.kernels import split_product, thin_product
from depthmix.ops.stream_mix.products import halves_of

OPS = Path(__file__).parents[2] / "depthmix" / "ops"
# Kernels that read a tile both for a product and into registers: one stage, whatever the shape.
RACED = {"_scores_kernel", "_hidden_kernel"}
# One that does so if it sums.
RACED_WITH_SUMS = "_product_kernel"
# Other kernels with products in a loop, and why their settings are safe.
SAFE = {
    "_score_kernel": "only products read what is loaded; what is added up here, they read from registers",
    "_out_kernel": "one stage",
    "_hidden_backward_kernel": "one stage",
    "_outer_kernel": "one stage",
    "_source_kernel": "one stage",
    "_thin_kernel": "only products read what the loop loads",
    "_down_kernel": "one stage",
    "_up_kernel": "one stage",
}
# Launched together with kernels that have products.
WITHOUT_PRODUCTS = {"_combine_kernel"}
ONE_STAGE = RACED | {name for name, why in SAFE.items() if why == "one stage"}
MODULES = (tiling, coefficients, scores, split_product, thin_product, few_tokens)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def calls_of(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of the functions that a function calls."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def kernels_with_products() -> set[str]:
    """Return the names of all kernels that multiply matrices, by themselves or in a device function."""
    functions = {
        node.name: set(calls_of(node))
        for path in OPS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }
    multiplying = {"tl.dot"}
    while more := {name for name, called in functions.items() if called & multiplying} - multiplying:
        multiplying |= more
    return {name for name in multiplying if name.endswith("_kernel")}


def test_every_kernel_with_a_product_is_judged() -> None:
    """A new kernel belongs to one of the two lists, once somebody has looked at what its loop loads."""
    assert kernels_with_products() == RACED | SAFE.keys() | {RACED_WITH_SUMS}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Collect the name and the options of every launch instead of launching."""
    collected: list[tuple[str, dict[str, Any]]] = []

    def launch(kernel: Any, grid: Any, like: Tensor, *arguments: Any, **options: Any) -> None:
        collected.append((kernel.fn.__name__, options))

    for module in MODULES:
        monkeypatch.setattr(module, "launch", launch)
    return collected


def all_launches(dim: int, tokens: int, dtype: torch.dtype) -> None:
    """Launch every kernel with products once, with and without what its settings depend on."""
    v = torch.zeros(tokens, dim, dtype=dtype)
    for rows in (1, 33, 130):
        w = torch.zeros(rows, dim)
        tiling.scores(tiling.SplitRows.of(w, dtype), [v, v], 1e-6)
        for add in (None, v):
            for across in (False, True):
                scores.add_and_score(v, add, w, across=across)
    w_1, w_2, b = torch.zeros(24, dim), torch.zeros(12, 24), torch.zeros(12)
    a, kept = coefficients.coefficients(v, w_1, w_2, b, 1e-6)
    coefficients.coefficients_backward(a, v, w_1, w_2, kept, True, True)
    streams = torch.zeros(tokens, 4, dim, dtype=dtype)
    for joint, sums in ((False, False), (False, True), (True, False), (True, True)):
        w = torch.zeros(6, 4 * dim if joint else dim).T
        for halves in (None, halves_of(w)):
            split_product.split_product(streams, 4, w, halves, joint=joint, sums=sums)
    weights = [torch.zeros(shape, dtype=dtype) for shape in ((4 * dim,), (6, 4 * dim), (4 * dim, 6), (4, 4 * dim))]
    few_tokens.read(Inputs(streams, v, torch.zeros(tokens, 4), *weights), 1e-6, 1.0)
    if dtype == torch.bfloat16:
        thin_product.thin_product(torch.zeros(tokens, 24, dtype=dtype), torch.zeros(24, 4 * dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "tokens"), [(64, 3), (512, 300), (2048, 17)])
def test_kernels_that_raced_have_one_stage(
    dim: int, tokens: int, dtype: torch.dtype, launches: list[tuple[str, dict[str, Any]]]
) -> None:
    all_launches(dim, tokens, dtype)
    expected = RACED | {RACED_WITH_SUMS} | SAFE.keys() - ({"_thin_kernel"} if dtype != torch.bfloat16 else set())
    assert {name for name, _ in launches} - WITHOUT_PRODUCTS == expected
    for name, options in launches:
        if name in ONE_STAGE or (name == RACED_WITH_SUMS and options["SUMS"]):
            assert options["num_stages"] == 1, name


@pytest.mark.parametrize(
    ("module", "name"),
    [(tiling, "_scores_kernel"), (coefficients, "_hidden_kernel"), (split_product, "_product_kernel")],
)
def test_no_loop_of_these_kernels_sets_stages_of_its_own(module: ModuleType, name: str) -> None:
    """A loop over tl.range(..., num_stages=n) would ignore the launch's setting."""
    assert "num_stages" not in inspect.getsource(getattr(module, name).fn)


@pytest.mark.parametrize(
    "function", [tiling.scores, coefficients.coefficients, split_product.split_product], ids=lambda f: f.__name__
)
def test_no_argument_raises_the_stages(function: Callable[..., Any]) -> None:
    assert "stages" not in inspect.signature(function).parameters
