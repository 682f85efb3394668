"""What a pass of a mixer really reads and writes, in units: one activation tensor [N, D] moved once.

Kernels run in Triton's interpreter, where every load and store is seen; of each launch an address counts once, since what it
reads again comes from a cache. Operators of PyTorch between them count with their inputs and outputs. Parameters and a few
numbers per token do not count.
"""

from contextlib import contextmanager

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix.ops.norm import RMSNorm
from depthmix.parallel.plan.costs import NORM

TOKENS, DIM, STREAMS = 5, 40, 2
SILENT = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "fill_",
    "detach",
    "alias",
    "_unsafe_view",
    "lift_fresh",
}  # allocations, and what poisons them


class Meter(TorchDispatchMode):
    """Counts what is moved while it is on; `units()` ends a phase."""

    def __init__(self, casts, streams):
        super().__init__()
        self.streams = streams
        self.casts = casts  # whether a change of dtype moves anything: on a GPU products take bf16 as it is
        self.alive, self.weight, self.bytes, self.launches, self.paused = [], {}, 0, [], False

    def weigh(self, t, made_by=""):
        """What a byte of a tensor counts, by how it came to be and its first shape: nothing if it is none of activations."""
        if not t.is_floating_point():
            return 0
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.weight:
            size, n = TOKENS * DIM, storage.nbytes() // t.element_size()
            cast = made_by == "_to_copy" and not self.casts and not self.paused
            if t.element_size() == 2:  # of what kernels run with, only tables of parameters are cast
                found = float(n >= size and n % size == 0 and not cast)
            elif t.shape == (TOKENS, DIM):  # in fp32 kernels fill what is allocated; a cast takes the place of bf16
                found = 0.5 if cast else float(self.casts or made_by in SILENT)
            else:
                streams = n == STREAMS * size and t.shape[0] in (TOKENS, TOKENS * STREAMS)
                found = 0.5 * (self.streams and streams and made_by in ("_to_copy", "mm"))
            self.weight[storage.data_ptr()] = found
            self.alive.append(t)  # so that no address is used twice
        return self.weight[storage.data_ptr()]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        given, made = list(tensors((args, kwargs))), list(tensors(out))
        for t in given:
            self.weigh(t)
        for t in made:
            self.weigh(t, "empty" if space == "depthmix" else name)
        cast = name == "_to_copy" and not self.casts
        views = not func._schema.is_mutable and any(same(a, b) for a in given for b in made)
        if self.paused or cast or views or space == "depthmix" or name in SILENT:
            return out
        read = {(t.data_ptr(), touched(t) * self.weigh(t)) for t in given}
        self.bytes += sum(n for _, n in read) + sum(touched(t) * self.weigh(t) for t in made)
        return out

    def units(self):
        """What was moved since the last call."""
        sums = {
            at for name, accesses in self.launches if name == "_sum_programs_kernel" for at in joined(accesses["load"])
        }
        known = [t.untyped_storage() for t in self.alive if self.weigh(t)]
        known = sorted(
            (s.data_ptr(), s.nbytes()) for s in known if s.data_ptr() not in sums
        )  # not what programs add up
        starts, sizes = (np.array(column, dtype=np.int64) for column in zip(*known, strict=True))
        weights = np.array([self.weight[int(start)] for start in starts])
        total = self.bytes
        for _, accesses in self.launches:
            for by_size in accesses.values():
                for size, addresses in by_size.items():
                    at = np.unique(np.concatenate(addresses))
                    place = np.maximum(np.searchsorted(starts, at, side="right") - 1, 0)
                    inside = (at >= starts[place]) & (at < starts[place] + sizes[place])
                    total += size * float(weights[place][inside].sum())
        self.bytes, self.launches = 0, []
        return total / (2 * TOKENS * DIM)


def joined(by_size):
    return np.unique(np.concatenate([a for parts in by_size.values() for a in parts])).tolist() if by_size else ()


def tensors(tree):
    return (t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def same(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def touched(t):
    """Bytes of a tensor in memory: an expanded one is as small as what it was."""
    n = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        n *= size if stride else 1
    return n * t.element_size()


@contextmanager
def metered(monkeypatch, kernels, streams):
    """A meter that also sees what interpreted kernels do. On a GPU the products beside them take bf16 as it is: no cast counts."""
    from triton.runtime import interpreter

    meter = Meter(not kernels, streams)
    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, grid.__call__

    def note(kind, ptrs, mask):
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        at = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))[
            np.broadcast_to(mask.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))
        ]
        meter.launches[-1][1][kind].setdefault(size, []).append(at.astype(np.int64).ravel())

    def create_masked_load(self, ptrs, mask, *rest):
        note("load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self, ptrs, value, mask, *rest):
        note("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def launched(self, *args, **kwargs):
        meter.launches.append((self.fn.__name__, {"load": {}, "store": {}}))
        meter.paused, before = True, meter.paused  # the interpreter copies what it is given
        try:
            return call(self, *args, **kwargs)
        finally:
            meter.paused = before

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", create_masked_load)
        patch.setattr(builder, "create_masked_store", create_masked_store)
        patch.setattr(grid, "__call__", launched)
        with meter:
            yield meter


def units_of(mixer, meter, monkeypatch):
    """Units of a pass forward and backward, norms included, and activations that are kept in between besides what sublayers keep."""

    @contextmanager
    def unseen(counted=0):
        meter.paused = True
        yield
        meter.paused, meter.bytes = False, meter.bytes + counted * 2 * TOKENS * DIM

    class Sublayer(torch.autograd.Function):
        """One that moves nothing; every tensor has memory of its own."""

        @staticmethod
        def forward(ctx, *h):
            ctx.n = len(h)
            with unseen():
                return sum(h)

        @staticmethod
        def backward(ctx, dy):
            with unseen():
                return tuple(dy.clone() for _ in range(ctx.n))

    class Norm(torch.autograd.Function):
        """A compiled one."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with unseen(NORM[0]):
                return x.clone()

        @staticmethod
        def backward(ctx, dy):
            with unseen(NORM[1]):
                return dy.clone()

    monkeypatch.setattr(RMSNorm, "__call__", lambda self, x: Norm.apply(x))
    norms = [[RMSNorm(DIM) for _ in range(mixer.ways(site))] for site in range(mixer.n_sites)]
    with unseen():
        x = torch.randn(TOKENS, DIM).half().requires_grad_()
    state, reads = mixer.start(x), []
    for site in range(mixer.n_sites):
        h = mixer.read(state, site, norms[site])
        h = h if isinstance(h, tuple) else (h,)
        reads += [t.untyped_storage().data_ptr() for t in h]
        state = mixer.write(state, site, Sublayer.apply(*h), scaled=True)  # as models that multiply in their weights
    out = Norm.apply(mixer.finish(state))
    del state, h
    forward, kept = meter.units(), saved(out, meter) - set(reads)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in meter.alive}
    with unseen():
        dy = torch.randn_like(out)
    torch.autograd.grad(out, [x, *mixer.parameters()], dy, allow_unused=True)
    return forward, meter.units(), sum(sizes[p] for p in kept) / (2 * TOKENS * DIM)


def saved(out, meter):
    """The memory of activations that a graph keeps for its backward."""
    found, seen, left = set(), set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [n for n, _ in node.next_functions]
        names = [n for n in dir(node) if n.startswith("_saved_")]
        values = [getattr(node, n) for n in names] if names else list(getattr(node, "saved_tensors", ()))
        found |= {t.untyped_storage().data_ptr() for t in tensors(values) if meter.weigh(t)}
    return found
