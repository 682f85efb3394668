"""What the workers do: the same model in one piece and among them, compared."""

import dataclasses
import functools
import runpy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix import Decoder, DecoderConfig
from depthmix.parallel.apply import Parallel
from depthmix.parallel.gradients import clip, local, norm, whole
from depthmix.parallel.layout import Layout
from depthmix.parallel.weights import fill, part_of
from depthmix.parallel.world import World, _mesh
from depthmix.train.evaluate import ALL
from depthmix.train.optim import AdamW
from project import ROOT

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 14, "dim": 16, "n_blocks": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_dim": 12, "qk_norm": True}
ROWS, LENGTH = 4, 8


@functools.cache
def world(**sizes):
    """This worker in a world of a layout."""
    layout = Layout.of(sizes)
    return World(layout, CPU, dist.get_rank(), _mesh(layout, CPU))


def decoder(mixer, options, **changes):
    return Decoder(DecoderConfig(**{**SHAPE, **changes}, mixer=mixer, mixer_options=options))


@torch.no_grad()
def disturb(model):
    """Move a mixer away from where it begins, which for many is where their gradients vanish."""
    for p in model.mixer.parameters():
        p += 0.3 * torch.randn_like(p)


def batch():
    return torch.randint(13, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))


def losses(model, ids, own=ALL):
    """As the trainer's, but in the model's own dtype."""
    logits, targets = model(own.of(ids[:, :-1], 1)), own.of(ids[:, 1:], 1)
    return whole(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))


def close(found, expected, what, scale=0.0):
    """Within 1e-5 (in fp64 1e-9) of the largest entry, or of a hundredth of the scale: in fp32 a rounding of it."""
    relative = 1e-5 if expected.dtype == torch.float32 else 1e-9
    allowed = relative * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-2 * scale)
    torch.testing.assert_close(found, expected, rtol=relative, atol=allowed, msg=lambda m: f"{what}: {m}")


def same_training(sizes, cases, dtype=torch.float32):
    """Initial weights, losses, gradients and their norm are those of one process."""
    torch.set_default_dtype(dtype)
    try:
        for mixer, options, changes in cases:
            same_step(world(**sizes), mixer, options, changes)
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def in_one_piece(mixer, options, changes, dtype):
    """A decoder after its first backward, its loss and its gradients' norm, and the weights and the random numbers it began with."""
    torch.manual_seed(3)
    model = decoder(mixer, dict(options), **dict(changes))
    began, drawn = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    disturb(model)
    loss = losses(model, batch()).mean()
    loss.backward()
    return model, loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5), began, drawn


def same_step(world, mixer, options, changes):
    what, build = (str(world.layout), mixer, options, changes), functools.partial(decoder, mixer, options, **changes)
    of = tuple(options.items()), tuple(changes.items())
    plain, expected, norm, began, drawn = in_one_piece(mixer, *of, torch.get_default_dtype())
    divided = Parallel(world, build, 3)
    assert torch.equal(torch.get_rng_state(), drawn), (what, "random numbers go on elsewhere")
    for (name, p), q in zip(divided.model.named_parameters(), began, strict=True):
        assert torch.equal(local(p), part_of(q, p)), (what, name, "begins elsewhere")
    for p, q in zip(divided.model.mixer.parameters(), plain.mixer.parameters(), strict=True):
        fill(p, q.detach())
    ids = batch()
    own = ids[world.rows(len(ids))]
    in_parts, messages = mixer == "attnres" and len(own) > 1, Messages()
    counted = in_parts and world.layout.tp == world.layout.cp == 1
    total, parts = torch.zeros(()), own.split(len(own) // 2 if in_parts else len(own))
    with messages if counted else nullcontext():
        for part in parts:
            before = messages.gradients
            with divided.part(last=part is parts[-1]):
                loss = losses(divided, part, world.share).mean() * (len(part) / len(own))
                loss.backward()
            total += loss.detach()
            if counted:
                assert (messages.gradients > before) == (part is parts[-1]), (what, "gradients sent too early, or not")
    close(world.average(total[None])[0], expected, (*what, "loss"))
    close(divided.clip(0.5), norm, (*what, "norm"))
    for (name, p), q in zip(divided.model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), (what, name)
        if q.grad is not None:
            close(local(p.grad), part_of(q.grad, p.grad), (*what, name), scale=0.5)


def divided_gradients():
    """Their norm, and AdamW's steps with them, are those of tensors in one piece, however they are divided."""
    mesh = world(shard=2).mesh["shard"]
    value = torch.arange(15.0).reshape(5, 3) - 4  # rows that two do not share evenly
    term, size = value * (1 + dist.get_rank()) / 3, value.norm()  # one of two terms
    gradients = [distribute_tensor(value, mesh, [Shard(0)]), distribute_tensor(value, mesh, [Replicate()])]
    gradients += [DTensor.from_local(term, mesh, [Partial()]), value.clone()]
    for gradient in gradients:
        of_one, parameter = nn.Parameter(value.clone()), nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
        if not isinstance(gradient, DTensor):
            parameter = nn.Parameter(value.clone())
        of_one.grad, parameter.grad = value.clone(), gradient.clone()
        close(norm([parameter]), size, (gradient, "norm"))
        optimizers = [AdamW([p], lr=0.1) for p in (of_one, parameter)]
        for optimizer in (*optimizers, *optimizers):
            optimizer.step()
        close(local(parameter), part_of(of_one.detach(), parameter), (gradient, "after two steps"))
        assert type(optimizers[1].state[parameter]["exp_avg"]) is type(parameter.data), (gradient, "state")
    together = [nn.Parameter(g.detach().clone()) for g in gradients]
    for p, g in zip(together, gradients, strict=True):
        p.grad = g
    close(clip(together, 1.0), 2 * size, "the norm of all")
    close(norm(together), torch.ones(()), "the norm after clipping")


class Messages(TorchDispatchMode):
    """Counts what is sent to add up gradients."""

    gradients = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.gradients += any(word in str(function) for word in ("reduce_scatter", "allreduce"))
        return function(*args, **(kwargs or {}))


def trains(sizes, config):
    """A training as one of its processes; the folder is for the test to look at."""
    from depthmix.train.loop import train_in

    here = world(**sizes)
    here.beside = here.beside or dist.new_group(backend="gloo")
    train_in(here, dataclasses.replace(config, parallel=sizes))


def example(name, arguments):
    """What the main function of an example returns."""
    return runpy.run_path(str(ROOT / "examples" / name))["main"](**arguments)
