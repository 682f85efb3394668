"""FSDP2 with one process and, in tests/parallel, with two (gloo): the same losses and gradients as without, mixers in fp32 under a bf16 policy."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree as pytree

from depthmix import ContractError, Decoder, DecoderConfig, create_mixer, shard_mixer
from depthmix.insight import gradient_norms, magnitudes
from project import ROOT, code_blocks

SHAPE = {"vocab_size": 11, "dim": 12, "n_blocks": 1, "n_heads": 2, "mlp_dim": 8}
IDS = torch.arange(12).reshape(4, 3) % 11
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)  # a state may hold fp32
CASES = [("attnres", {"ways": 2}), ("dca", {}), ("mhc", {"residual_map": "birkhoff", "schedule": "single_pass"})]


def decoder(name, options):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SHAPE, mixer=name, mixer_options=options, tie_embeddings=True))
    with torch.no_grad():
        for p in model.mixer.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


class Blocks(nn.Module):
    """States that go into wrapped blocks and come out of them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(12) for _ in range(2))
            self.linears = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

        def forward(self, mixer, state):
            for norm, linear in zip(self.norms, self.linears, strict=True):
                state = mixer.write(state, state.site, linear(mixer.read(state, state.site, norm)))
            return state

    def __init__(self, name, options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 12)
        self.sublayers = nn.ModuleList(self.Block() for _ in range(2))
        self.mixer = create_mixer(name, dim=12, n_blocks=2, **options)
        for p in self.mixer.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, ids):
        state = self.mixer.start(self.embedding(ids))
        for block in self.sublayers:
            state = block(self.mixer, state)
        return self.mixer.finish(state)


def sharded(model, mesh, policy=None):
    policy = policy or MixedPrecisionPolicy()
    for sublayer in model.sublayers:
        fully_shard(sublayer, mesh=mesh, mp_policy=policy)
    shard_mixer(model.mixer, mesh=mesh)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def loss_of(model, ids):
    out = model(ids).float()
    return (out * torch.linspace(-1, 1, out.shape[-1])).square().mean()


def gradients(model):
    return {
        k: None if p.grad is None else getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for k, p in model.named_parameters()
    }


def assert_close(got, expected, what):
    for key, g in expected.items():
        assert (got[key] is None) == (g is None), (what, key)
        if g is not None:
            torch.testing.assert_close(
                got[key],
                g,
                rtol=1e-4,
                atol=1e-6 * max(1.0, float(g.abs().max())),
                msg=lambda m, k=key: f"{what} {k}: {m}",
            )


def check_training(make, name, options, mesh):
    """Two steps, the second with twice the passes before its backward, against the model in one piece on the whole batch."""
    what, plain = (make.__name__, name, options), make(name, options)
    model = sharded(copy.deepcopy(plain), mesh)
    own = IDS.chunk(mesh.size())[mesh.get_rank()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for passes in (1, 2):
        for m, ids in ((plain, IDS), (model, own)):
            losses = [loss_of(m, ids.roll(k, 1)) for k in range(passes)]
            with torch.no_grad():
                m(ids)  # someone evaluates in between
            for loss in losses:
                loss.backward()
            if passes == 1:  # or looks at M before the step
                m.mixer.mixing([torch.ones(1, 12)] * (m.mixer.n_sites + 1))
            else:
                with torch.no_grad():
                    m(ids)
        model.reshard()  # after an evaluation FSDP2 leaves the root's parameters to its user
        assert_close(gradients(model), gradients(plain), what)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(own), plain(own), rtol=1e-4, atol=1e-5)


def check_policy(name, options, mesh):
    """Under a bf16 policy the logits are, to the bit, those of a model in bf16 whose mixer is in fp32."""
    plain = decoder(name, options)
    model, narrow = sharded(copy.deepcopy(plain), mesh, BF16), plain.bfloat16()
    seen = []
    read = model.mixer._read
    model.mixer._read = lambda *args: (seen.extend(p.dtype for p in model.mixer.parameters()), read(*args))[1]
    logits = model(IDS)
    assert set(seen) <= {torch.float32}
    assert torch.equal(logits, narrow(IDS))
    logits.float().square().mean().backward()
    for p in model.mixer.parameters():
        assert p.dtype == p.grad.dtype == torch.float32


def check_dynamics(name, options, mesh):
    """Magnitudes are those of a process's own tokens, gradient norms those of all shards; looking leaves training alone."""
    plain = decoder(name, options)
    model, own = sharded(copy.deepcopy(plain), mesh), IDS.chunk(mesh.size())[mesh.get_rank()]
    expected, found = magnitudes(plain, own), magnitudes(model, own)
    for key, value in expected.items():
        assert torch.tensor(pytree.tree_leaves(found[key])).allclose(torch.tensor(pytree.tree_leaves(value)), atol=1e-6)
    for m, ids in ((plain, IDS), (model, own)):
        loss_of(m, ids).backward()
    assert_close(gradients(model), gradients(plain), (name, options))
    torch.testing.assert_close(gradient_norms(model.sublayers), gradient_norms(plain.sublayers), rtol=1e-4, atol=1e-6)


def check_built_empty(name, options, mesh):
    """Built on the meta device, sharded, given memory, loaded: as large models begin."""
    plain = decoder(name, options)
    with torch.device("meta"):
        model = sharded(decoder(name, options), mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), plain(IDS))


def check_alone(mesh):
    """Without a model around it nothing would reduce the gradients."""
    mixer = shard_mixer(create_mixer("attnres", dim=12, n_blocks=1), mesh=mesh)
    with pytest.raises(ContractError, match="call fully_shard on the model"):
        mixer.start(torch.randn(2, 12))
    with torch.no_grad():
        assert mixer.read(mixer.start(torch.ones(2, 12)), 0).sum() == 24


def checks():
    """All of the above, as one of the processes of a group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, options in CASES:
        check_training(decoder, name, options, mesh)
        check_policy(name, options, mesh)
        check_dynamics(name, options, mesh)
        check_built_empty(name, options, mesh)
    check_training(Blocks, "attnres", {"block_size": 3}, mesh)
    check_alone(mesh)


def test_with_one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        checks()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page leaves the device to FSDP2, and gloo is for the CPU")
def test_the_page_on_ones_own_model(tmp_path):
    """Its code, one block after the other, but for the one on loading a run, which has a test where there is a run."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        names = {}
        for code in code_blocks(ROOT / "docs" / "guides" / "own-model.md"):
            if "depthmix.load(" not in code:
                exec(code, names)
        names["model"](IDS).sum().backward()
        assert names["model"].mixer.query.grad.dtype == torch.float32
    finally:
        dist.destroy_process_group()
