"""Rules whose weighted sums run on the kernels of depth_sum: the same reads and gradients as in plain PyTorch."""

import pytest
import torch

from depthmix.ops import use_backend
from harness import as_tuple, build

pytest.importorskip("triton")
DIM = 16


def reads_and_gradients(mixer, sources, backend):
    leaves = [source.clone().requires_grad_() for source in sources]
    with use_backend(backend):
        state, reads = mixer.start(leaves[0]), []
        for site in range(mixer.n_sites):
            reads += as_tuple(mixer.read(state, site))
            state = mixer.write(state, site, leaves[site + 1])
        reads.append(mixer.finish(state))
        loss = sum((h * torch.linspace(-1, 1, DIM)).square().mean() for h in reads)
        return [*reads, *torch.autograd.grad(loss, [*leaves, *mixer.parameters()])]


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("lambdas", {"backout": True}),
        ("lambdas", {"per": "site", "channels": True}),
        ("unet", {"gate": "vector"}),
        ("unet", {"gate": "token"}),
    ],
    ids=str,
)
def test_kernels_give_the_same(name, choice):
    mixer = build(name, 3, choice, random=True, dim=DIM, dtype=torch.float32)
    sources = [torch.randn(1, 3, DIM) for _ in range(mixer.n_sites + 1)]
    expected = reads_and_gradients(mixer, sources, "reference")
    for ours, theirs in zip(reads_and_gradients(mixer, sources, "triton"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
