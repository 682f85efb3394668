"""The logit lens: at finish it is the model, and elsewhere the model's own norm and head of what a site reads."""

import pytest
import torch

from depthmix import list_mixers
from depthmix.insight.lens import logit_lens
from insight.small_decoder import B, T, decoder, tokens

IDS = tokens()


def reads_of(model):
    """Record with hooks what every reader reads before its norm: [S+1][ways]."""
    reads, handles = [], []
    for norms in [*model.norms, [model.final_norm]]:
        reads.append([])
        handles += [
            norm.register_forward_pre_hook(lambda module, args, to=reads[-1]: to.append(args[0])) for norm in norms
        ]
    model(IDS)
    for handle in handles:
        handle.remove()
    return reads


@pytest.mark.parametrize("mixer", list_mixers())
@torch.no_grad()
def test_the_lens_is_the_models_norm_and_head_of_every_read(mixer):
    model = decoder(mixer, {"ways": 2} if mixer == "attnres" else {})
    found, n = logit_lens(model, IDS), model.mixer.n_sites + 1
    assert found.tokens.shape == found.probabilities.shape == (n, B, T)
    own = model(IDS).softmax(-1)
    for reader, ways in enumerate(reads_of(model)):
        p = model.head(model.final_norm(torch.stack(ways).mean(0))).softmax(-1)
        if reader == n - 1:
            torch.testing.assert_close(p, own)
        torch.testing.assert_close(found.probabilities[reader], p.amax(-1))
        assert torch.equal(found.tokens[reader], p.argmax(-1))
        torch.testing.assert_close(found.following[reader], p[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0])
    assert not {"start", "read", "write", "finish"} & set(vars(model.mixer))


def test_however_many_readers_share_a_pass_the_result_is_the_same():
    model = decoder("dca")
    expected = logit_lens(model, IDS)
    for at_once in (1, 2 * B * T * 13):
        found = logit_lens(model, IDS, at_once=at_once)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.following, expected.following)


def test_a_model_whose_batch_cannot_grow_is_read_one_reader_after_the_other():
    model = decoder("attnres")
    expected = logit_lens(model, IDS)

    def fixed(module, args):
        if len(args[0]) > B:
            raise RuntimeError("a mask for other rows")

    model.final_norm.register_forward_pre_hook(fixed)
    found = logit_lens(model, IDS)
    torch.testing.assert_close(found.probabilities, expected.probabilities)
