"""What the workers do for tests of pipelines: the same model in one piece and in stages, compared."""

import copy
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from depthmix import Decoder, DecoderConfig, shard_mixer
from depthmix.parallel.pipeline import pipeline
from depthmix.parallel.pipeline.piece import cut_state
from depthmix.parallel.plan.layout import Layout

SHAPE = {"vocab_size": 13, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "mlp_dim": 12, "qk_norm": True}
LENGTH = 6


def decoder(mixer, options, changes):
    """A decoder whose mixer is away from where it begins, which for many is where gradients vanish."""
    torch.manual_seed(3)
    model = Decoder(DecoderConfig(**{**SHAPE, **changes}, mixer=mixer, mixer_options=options))
    with torch.no_grad():
        for p in model.mixer.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


def batch(rows, step=0):
    return torch.randint(13, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def losses(model, ids):
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def close(found, expected, what):
    """Within 1e-5 of the largest entry, or of a thousandth."""
    assert found.shape == expected.shape, what
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * max(largest, 1e-3)), (what, found, expected)


def staged(model, sizes, schedule, micros, **options):
    build = lambda: copy.deepcopy(model)  # noqa: E731
    return pipeline(model.config, build, Layout(**sizes), schedule, micros, **options)


def same_gradients(pipe, plain, what):
    """Every gradient of this rank's pieces is the part of the whole's; where that has none, theirs is none or zero."""
    of_whole = {n: p.grad for n, p in plain.named_parameters()}
    if plain.config.tie_embeddings:
        of_whole["head.weight"] = of_whole["embedding.weight"]
    for piece in pipe.pieces.values():
        expected = cut_state(pipe._mixer, {n: g for n, g in of_whole.items() if g is not None}, piece)
        seen = 0
        for name, p in piece.named_parameters():
            if name in expected:
                close(torch.zeros_like(p) if p.grad is None else p.grad, expected[name], (*what, name))
            else:
                assert p.grad is None or not p.grad.any(), (*what, name, "has a gradient")
            seen += 1
        assert seen == len(list(piece.parameters())) > 0


def checkpointed(piece):
    """As the trainer does it."""
    for sublayer in piece.repeated_parts()[0]:
        sublayer.forward = functools.partial(checkpoint, sublayer.forward, use_reentrant=False)
    return piece


def same_training(sizes, schedule, cases, micros, cache="all", recompute=False):
    """Losses, gradients, their norm, state dicts and an evaluation are those of one process.

    Returns the bytes that this rank's stages sent for a micro-batch of the last case: {stage: (forward, backward)}.
    """
    for mixer, options, changes in cases:
        what = (str(sizes), schedule, mixer, options, changes)
        plain = decoder(mixer, options, changes)
        pipe = staged(plain, sizes, schedule, micros, cache=cache, **({"wrap": checkpointed} if recompute else {}))
        ids = batch(2 * micros)
        expected = losses(plain, ids)
        expected.backward()
        if options:  # the machinery is the same for all
            whole, found = plain.state_dict(), pipe.whole()
            assert found.keys() == whole.keys(), what
            assert all(torch.equal(found[name], whole[name]) for name in whole), what
        if mixer == "attnres":
            close(pipe.evaluate(ids), expected.detach(), (*what, "evaluation"))
            assert all(p.grad is None for p in pipe.parameters()), what
        for stage in pipe.stages:
            stage.sent_forward = stage.sent_backward = 0
        close(pipe.step(ids), expected.detach(), (*what, "loss"))
        same_gradients(pipe, plain, what)
        assert not pipe.stages[0].bank.values, (what, "tensors are kept after the step")
        assert not pipe.stages[0].bank.gradients, (what, "gradients are left over")
        assert not any(s.fwd_cache or s._arriving or s._returning or s._products for s in pipe.stages), what
        if mixer == "attnres":
            norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), pipe.clip(0.5)
            close(norms[1], norms[0], (*what, "norm"))
            same_gradients(pipe, plain, (*what, "clipped"))
    return {s.stage_index: (s.sent_forward / micros, s.sent_backward / micros) for s in pipe.stages}


def loads(sizes, schedule, case, micros):
    """Pieces of another decoder, after loading, are this one's; what was loaded is found again."""
    plain, other = decoder(*case), decoder(*case)
    with torch.no_grad():
        for p in other.parameters():
            p += 1
    pipe = staged(other, sizes, schedule, micros)
    pipe.load(plain.state_dict())
    ids = batch(2 * micros)
    close(pipe.evaluate(ids), losses(plain, ids).detach(), "loaded")
    whole = plain.state_dict()
    assert all(torch.equal(t, whole[name]) for name, t in pipe.whole().items())
    rows = {name: t.shape for piece in pipe.pieces.values() for name, t in piece.mixer.named_parameters()}
    return rows


def ten_steps(sizes, schedule, case, micros, optimizer):
    """Ten steps stay together, and the loss falls."""
    plain = decoder(*case)
    pipe = staged(plain, sizes, schedule, micros)
    make = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    }
    ours, theirs = make[optimizer](list(pipe.parameters())), make[optimizer](plain.parameters())
    seen = []
    for step in range(10):
        ids = batch(2 * micros, step % 2)
        ours.zero_grad()
        theirs.zero_grad()
        expected = losses(plain, ids)
        expected.backward()
        found = pipe.step(ids)
        torch.testing.assert_close(
            found, expected.detach(), rtol=1e-4, atol=1e-4, msg=lambda m, s=step: f"step {s}: {m}"
        )
        ours.step()
        theirs.step()
        seen.append(float(found))
    assert min(seen[-2:]) < min(seen[:2]), seen


def narrow(sizes, schedule, case, micros):
    """Under autocast losses are exactly those of micro-batches in one process; returns bytes sent forward for one."""
    plain = decoder(*case)
    pipe = staged(plain, sizes, schedule, micros, dtype=torch.bfloat16)
    ids = batch(2 * micros)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.stack([losses(plain, part).detach().float() / micros for part in ids.split(2)]).sum()
        found = pipe.step(ids)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert all(p.grad is None or p.grad.isfinite().all() for p in pipe.parameters())
    return {s.stage_index: s.sent_forward / micros for s in pipe.stages}


def sharded(schedule, sizes, cases, micros):
    """FSDP2 in every stage: each of two pipelines has half of the batch, and gradients are those of all of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))

    def wrap(piece):
        for module in (*piece.repeated_parts()[0], *([piece.head] if piece.last else [])):
            fully_shard(module, mesh=mesh["shard"])
        shard_mixer(piece.mixer, mesh=mesh["shard"])
        return fully_shard(piece, mesh=mesh["shard"])

    for case in cases:
        plain = decoder(*case)
        pipe = staged(plain, sizes, schedule, micros, group=mesh["pp"].get_group(), wrap=wrap)
        ids = batch(4 * micros)
        expected = losses(plain, ids)
        expected.backward()
        for _ in range(2):  # the second time shards have been together before
            for p in pipe.parameters():
                p.grad = None
            loss = pipe.step(ids.chunk(2)[mesh["shard"].get_local_rank()])
        dist.all_reduce(loss, group=mesh["shard"].get_group())
        close(loss / 2, expected.detach(), (case, "loss"))
        of_whole = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        for again in ("", "clipped"):
            for piece in pipe.pieces.values():
                for name, part in cut_state(pipe._mixer, of_whole, piece).items():
                    g = piece.get_parameter(name).grad
                    close(torch.zeros_like(part) if g is None else g.full_tensor(), part, (case, name, again))
            norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), pipe.clip(0.5)
            close(norms[1], norms[0], (case, "norm"))
