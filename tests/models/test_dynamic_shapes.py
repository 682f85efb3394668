"""torch.compile(dynamic=True): lengths are symbols, sites are not."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from depthmix import Decoder, DecoderConfig, create_mixer
from depthmix.ops import use_backend

pytestmark = pytest.mark.uncovered


def worst(run, model, x):
    """The largest difference between a compiled model's gradients and its own."""
    wanted = list(model.parameters())
    found, expected = (torch.autograd.grad(f(x).square().mean(), wanted, allow_unused=True) for f in (run, model))
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a is not None)


def test_a_decoder_is_one_graph_for_all_lengths():
    """Traced once; what becomes of symbols behind the trace is tested below, and on a GPU."""
    model = Decoder(DecoderConfig(vocab_size=40, dim=16, n_blocks=1, n_heads=2, mixer="attnres"))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    for length in (8, 11):
        assert worst(compiled, model, torch.randint(0, 40, (2, length))) < 1e-6
    assert counter.frame_count == 1


class Broken(nn.Module):
    """A model of one's own, with a graph break after every read."""

    def __init__(self):
        super().__init__()
        self.mixer = create_mixer("attnres", dim=16, n_blocks=1)
        self.norms = nn.ModuleList(nn.RMSNorm(16, eps=1e-6) for _ in range(self.mixer.n_sites))

    def forward(self, x):
        state = self.mixer.start(x)
        for site, norm in enumerate(self.norms):
            h = self.mixer.read(state, site, norm)
            torch._dynamo.graph_break()
            state = self.mixer.write(state, site, h.tanh())
        return self.mixer.finish(state)


def test_a_site_is_a_plain_number_in_pieces_of_a_model():
    """As a symbol it would reach the compiled code of a piece that does not define it."""
    pytest.importorskip("triton")
    model, x, symbols = Broken(), torch.randn(2, 5, 16), []

    def compiler(graph, inputs):
        symbols.append([i.node.hint for i in inputs if isinstance(i, torch.SymInt) and i.node.maybe_as_int() is None])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True, backend=compiler)
    with use_backend("triton"), torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert len(symbols) > 4
    assert {2, 5} <= {size for piece in symbols for size in piece} <= {2, 3, 5, 16}  # of x and three queries
