"""What the workers do for tests of pipelines: the same model in one piece and in stages, compared."""

import copy
import functools

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from depthmix import Decoder, DecoderConfig
from depthmix.parallel.gradients import local, whole
from depthmix.parallel.pipeline import pipeline
from depthmix.parallel.pipeline.piece import MIXER, tensors_of_piece
from depthmix.parallel.plan.layout import Layout
from depthmix.parallel.staged import Staged
from depthmix.parallel.weights import fill, part_of
from parallel.jobs import disturb, world
from parallel.jobs import losses as token_losses

SHAPE = {"vocab_size": 13, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "mlp_dim": 12, "qk_norm": True}
LENGTH = 6


def decoder(mixer, options, changes):
    """A decoder whose mixer is away from where it begins, which for many is where gradients vanish."""
    torch.manual_seed(3)
    model = Decoder(DecoderConfig(**{**SHAPE, **changes}, mixer=mixer, mixer_options=options))
    disturb(model)
    return model


def batch(rows, step=0):
    return torch.randint(13, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def losses(model, ids):
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def close(found, expected, what):
    """Within 1e-5 (in fp64 1e-9) of the largest entry, or of a thousandth."""
    assert found.shape == expected.shape, what
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    near = 1e-5 if expected.dtype == torch.float32 else 1e-9
    assert torch.allclose(found, expected, rtol=near, atol=near * max(largest, 1e-3)), (what, found, expected)


def staged(model, sizes, schedule, micros, **options):
    build = lambda: copy.deepcopy(model)  # noqa: E731
    return pipeline(model.config, build, Layout(**sizes), schedule, micros, **options)


def same_gradients(pipe, plain, what):
    """Gradients of what pieces own are those of the whole; where that has none, and in other stages' rows, they are none or zero."""
    of_whole = {n: p.grad for n, p in plain.named_parameters()}
    if plain.config.tie_embeddings:
        of_whole["head.weight"] = of_whole["embedding.weight"]
    for piece in pipe.pieces.values():
        expected = tensors_of_piece(piece, {n: g for n, g in of_whole.items() if g is not None})
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in piece.named_parameters()}
        own = tensors_of_piece(piece, found)
        assert expected.keys() <= own.keys(), what
        for name, gradient in expected.items():
            close(own[name], gradient, (*what, name))
            own[name].zero_()
        assert not [name for name, rest in found.items() if rest.any()], what


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
    (own,) = (tensors_of_piece(piece, piece.state_dict()) for piece in pipe.pieces.values())
    return {name.removeprefix(MIXER): t.shape for name, t in own.items()}


def narrow(sizes, case, micros):
    """Under autocast losses and gradients are those of micro-batches in one process; returns bytes sent forward for one."""
    here, plain = world(**sizes), decoder(*case)
    engine = Staged(here, lambda: copy.deepcopy(plain), 0, torch.bfloat16, weights=plain, microbatches=micros)

    def loss(rows, model):
        with torch.autocast("cpu", torch.bfloat16):
            return token_losses(model, rows).mean()

    ids, expected = batch(2 * micros), torch.zeros(())
    for part in ids.split(2):
        of_part = loss(part, plain) / micros
        of_part.backward()
        expected += of_part.detach()
    torch.testing.assert_close(engine.backward(loss, ids, 2), expected, rtol=1e-6, atol=1e-6)
    of_whole = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    equal_parts(engine, of_whole, {n: p.grad for n, p in engine.model.named_parameters()}, ("narrow",))
    return {s.stage_index: s.sent_forward / micros for s in engine.pipe.stages}


def equal_parts(engine, of_whole, found, what):
    """This process's tensors are the parts that it has of a whole decoder's, by name; where that has none, there is none."""
    if engine.blueprint.config.tie_embeddings and "embedding.weight" in of_whole:
        of_whole = {**of_whole, "head.weight": of_whole["embedding.weight"]}
    for stage, piece in engine.pieces.items():
        expected = tensors_of_piece(piece, of_whole)
        for name, _ in piece.named_parameters():
            t, rows = found[f"{stage}.{name}"], piece.rows_of(name) if name.startswith(MIXER) else None
            if name.startswith(MIXER) and rows is None:  # another stage has it
                continue
            assert (t is None) == (name not in expected), (*what, name)
            if t is not None and rows is not None:
                close(whole(t)[rows], expected[name], (*what, name))
            elif t is not None:
                close(local(t), part_of(expected[name], t), (*what, name))


def in_stages(sizes, cases, micros, dtype=torch.float32):
    """Layouts with pp, as the trainer has them: weights, losses, gradients, their norm, sums and what is saved are those of one process.

    Returns the bytes that this process's stages sent forward for a micro-batch of the last case.
    """
    here = world(**sizes)
    torch.set_default_dtype(dtype)
    try:
        for case in cases:
            engine = same_engine(here, micros, *case)
    finally:
        torch.set_default_dtype(torch.float32)
    return {s.stage_index: s.sent_forward / micros for s in engine.pipe.stages}


def same_engine(here, micros, mixer, options, changes):
    what = (str(here.layout), here.layout.order, mixer, options, changes)
    build = lambda: Decoder(DecoderConfig(**{**SHAPE, **changes}, mixer=mixer, mixer_options=options))  # noqa: E731
    torch.manual_seed(3)
    plain = build()
    drawn, parameters = torch.get_rng_state(), dict(plain.named_parameters())
    engine = Staged(here, build, 3, microbatches=micros)
    assert torch.equal(torch.get_rng_state(), drawn), (what, "random numbers go on elsewhere")
    equal_parts(engine, {n: p.detach() for n, p in parameters.items()}, dict(engine.model.named_parameters()), what)
    disturb(plain)

    def read(shapes, place):
        assert shapes == {n: p.shape for n, p in parameters.items()}
        for n, p in parameters.items():
            found = place(n, p.shape)
            if not found.is_meta:
                fill(found, p.detach())
                yield n, found

    assert engine.load(lambda *given: dict(read(*given)), None) == {}
    loss = lambda rows, model: token_losses(model, rows).mean()  # noqa: E731

    ids = batch(2 * micros * here.layout.data)
    expected = token_losses(plain, ids).mean()
    if changes["n_blocks"] > 2:  # the machinery is the same for all
        looks(engine, plain, here, ids[:4], loss, what)
    for stage in engine.pipe.stages:
        stage.sent_forward = 0
    expected.backward()
    total = engine.backward(loss, ids[here.rows(len(ids))], 2)
    close(here.average(total[None])[0], expected.detach(), (*what, "loss"))
    close(engine.clip(0.5), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), (*what, "norm"))
    of_whole = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    equal_parts(engine, of_whole, {n: p.grad for n, p in engine.model.named_parameters()}, (*what, "clipped"))

    saved = engine.saved({f"adam/{n}": p.detach() for n, p in engine.model.named_parameters()})
    for name, t in saved.items():
        close(whole(t), parameters[name.removeprefix("adam/")].detach(), (*what, "saved", name))
    names = [n for there in here.gather(list(saved)) for n in there]
    assert {n.removeprefix("adam/") for n in names} == set(parameters), what
    return engine


def looks(engine, plain, here, ids, loss, what):
    """What the trainer finds out between steps: a gradient's norm that is not kept, and sums over batches of which some do not count."""
    few, parameters = (ids[:3], ids[3:]), list(plain.parameters())
    if here.layout.tp == 1:
        expected = loss(few[0], plain)
        gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
        found, norm = engine.probe(loss, few[0])  # by every pipeline
        close(found, expected.detach(), (*what, "probe"))
        close(
            norm, torch.nn.utils.get_total_norm([g for g in gradients if g is not None]), (*what, "norm of the probe")
        )
        assert all(p.grad is None for p in engine.parameters), what
    sums = engine.sums(
        lambda model, rows: [float(token_losses(model, rows).sum()), len(rows)],
        [(few[0], True), (few[1], True), (few[0], False)],
    )
    if here.layout.place(here.rank)[0] == here.layout.pp - 1:
        close(torch.tensor(sums), torch.tensor([float(token_losses(plain, ids).sum()), 4.0]), (*what, "sums"))
    else:
        assert sums == [], what
