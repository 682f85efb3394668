"""Kernels of a read of gated residual streams, and the products between them.

    forward     x, y -> [write, rms] x', r;   x' -> product, stream by stream -> [network] u, post -> product -> z;   [gate] h
    backward    [gate] dz -> product, product -> [network] e -> product, product -> [weights];   [streams] dx, dy, dpost

The normed streams x̂_i = r_i gain_i ⊙ x'_i are never stored. A product with them is one of each stream with W ⊙ gain, and the scale r_i of
a token multiplies its result, in fp32. Likewise the gates are computed again from their logits z in the backward.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gated_streams.kernels.norm_and_mean import load, write_token
from depthmix.ops.gated_streams.reference import Inputs
from depthmix.ops.gpu.launch import count_cores, launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Channels of a stream that a program of a kernel without sums over channels takes.
CHANNELS = 512
# Programs of the gates' backward that a core runs at a time: each adds up the gradient of the gain over its own tokens.
PROGRAMS = 4
# Columns of the products come in multiples of this number, so that rows begin at multiples of 16 bytes.
ALIGNED = 8


class Kept(NamedTuple):
    """Hold what the backward of a read needs besides its inputs. R: rank; P: rank and writes, rounded up to ALIGNED."""

    r: Tensor  # [N, n], 1 / rms of each stream
    t: Tensor  # [N, R], what silu is applied to
    u: Tensor  # [N, R], silu(t)
    z: Tensor  # [N, n, D], logits of the gates


@triton.jit
def _fold_kernel(
    down, inject, gain, folded, offset, S: tl.constexpr, BS: tl.constexpr, R: tl.constexpr, M: tl.constexpr
):
    row, k = tl.program_id(0), tl.program_id(1) * BS + tl.arange(0, BS)
    # Rows after the last one are zeros.
    at = row.to(tl.int64)
    w = load(down + at * S + k, k < tl.where(row < R, S, 0))
    if M > 0:
        w += load(inject + (at - R) * S + k, k < tl.where((row >= R) & (row < R + M), S, 0))
    w *= load(gain + k, k < S) + offset
    tl.store(folded + row.to(tl.int64) * S + k, w.to(folded.dtype.element_ty), mask=k < S)


@triton.jit
def _write_rms_kernel(
    x, y, post, new, r, eps, n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WRITE: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, BN), tl.arange(0, BD)
    v = write_token(x, y, post, new, t, i, d, n, D, WRITE)
    tl.store(r + t * n + i, tl.rsqrt(tl.sum(v * v, 1) / D + eps), mask=i < n)


@triton.jit(do_not_specialize=["N"])
def _network_kernel(
    sums, r, t_out, u, post, N: tl.int64,
    n: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    t, j = tl.program_id(0).to(tl.int64), tl.arange(0, BP)
    acc = tl.zeros([BP], tl.float32)
    for i in tl.static_range(n):
        acc += tl.load(r + t * n + i) * load(sums + (i * N + t) * P + j, j < P)
    acc /= n
    tl.store(t_out + t * R + j, acc.to(t_out.dtype.element_ty), mask=j < R)
    tl.store(u + t * R + j, (acc * tl.sigmoid(acc)).to(u.dtype.element_ty), mask=j < R)
    if M > 0:
        tl.store(post + t * M + (j - R), 2.0 * tl.sigmoid(acc), mask=(j >= R) & (j < R + M))


@triton.jit
def _gate_kernel(z, x, r, gain, h, offset, n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, BN), tl.program_id(1) * BD + tl.arange(0, BD)
    ok = (i < n)[:, None] & (d < D)[None, :]
    place = i[:, None] * D + d[None, :]
    normed = load(x + t * n * D + place, ok) * load(r + t * n + i, i < n)[:, None]
    normed *= load(gain + place, ok) + offset
    out = tl.sum(tl.sigmoid(load(z + t * n * D + place, ok)) * normed, 0) / n
    tl.store(h + t * D + d, out.to(h.dtype.element_ty), mask=d < D)


@triton.jit
def _gate_rows(z, x, r, dh, t, N, i, d, n: tl.constexpr, D: tl.constexpr):
    """Load what a token brings to the backward of its gates, or nothing after the last token."""
    streams, channels = tl.where(t < N, n, 0), tl.where(t < N, D, 0)
    ok = (i < streams)[:, None] & (d < D)[None, :]
    at = t * n * D + i[:, None] * D + d[None, :]
    logits, v = tl.load(z + at, mask=ok, other=0.0), tl.load(x + at, mask=ok, other=0.0)
    scale = tl.load(r + t * n + i, mask=i < streams, other=0.0)
    return logits, v, scale, tl.load(dh + t * D + d, mask=d < channels, other=0.0)


@triton.jit(do_not_specialize=["N"])
def _gate_backward_kernel(
    z, x, r, gain, dh, dz, part, N: tl.int64, offset,
    n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    i, d = tl.arange(0, BN), tl.program_id(1) * BD + tl.arange(0, BD)
    ok = (i < n)[:, None] & (d < D)[None, :]
    place = i[:, None] * D + d[None, :]
    weight = load(gain + place, ok) + offset
    dgain = tl.zeros([BN, BD], tl.float32)
    first, every = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    logits, v, scale, g = _gate_rows(z, x, r, dh, first, N, i, d, n, D)
    for t in tl.range(first, N, every, num_stages=1):
        # The next token is on its way while this one is computed.
        next_logits, next_v, next_scale, next_g = _gate_rows(z, x, r, dh, t + every, N, i, d, n, D)
        scaled = v.to(tl.float32) * scale[:, None]
        of_mean = (g.to(tl.float32) / n)[None, :]
        a = tl.sigmoid(logits.to(tl.float32))
        if GAIN:
            dgain += of_mean * a * scaled
        step = of_mean * scaled * weight * a * (1.0 - a)
        tl.store(dz + t * n * D + place, step.to(dz.dtype.element_ty), mask=ok)
        logits, v, scale, g = next_logits, next_v, next_scale, next_g
    if GAIN:
        tl.store(part + tl.program_id(0).to(tl.int64) * n * D + place, dgain, mask=ok)


@triton.jit(do_not_specialize=["N"])
def _network_backward_kernel(
    du, t_in, post, dpost, r, e, scaled, N: tl.int64,
    n: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, M: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    t, j = tl.program_id(0).to(tl.int64), tl.arange(0, BP)
    v = load(t_in + t * R + j, j < R)
    s = tl.sigmoid(v)
    g = load(du + t * R + j, j < R) * s * (1.0 + v * (1.0 - s))
    if M > 0:
        inside = (j >= R) & (j < R + M)
        c = load(post + t * M + (j - R), inside)
        g += load(dpost + t * M + (j - R), inside) * c * (1.0 - 0.5 * c)
    g /= n
    tl.store(e + t * P + j, g.to(e.dtype.element_ty), mask=j < P)
    if SCALED:
        for i in tl.static_range(n):
            scale = tl.load(r + t * n + i)
            tl.store(scaled + (i * N + t) * P + j, (g * scale).to(scaled.dtype.element_ty), mask=j < P)


@triton.jit
def _rows_backward(
    sums, w, dw, weight, start, rows: tl.constexpr, k, d,
    S: tl.constexpr, D: tl.constexpr, BJ: tl.constexpr, OF_ROW: tl.constexpr,
):  # fmt: skip
    """Store the gradients of BJ rows of weights, and return what the gain's gradient gets from them, row by row."""
    j = start + tl.arange(0, BJ)
    ok = (j < rows)[:, None] & (d < D)[None, :]
    at = j[:, None].to(tl.int64) * S + k[None, :]
    g = load(sums + j[:, None] * OF_ROW + d[None, :], ok)
    of_gain = g * load(w + at, ok)
    tl.store(dw + at, (g * weight).to(dw.dtype.element_ty), mask=ok)
    return of_gain


@triton.jit(do_not_specialize=["programs"])
def _weights_backward_kernel(
    sums, down, inject, gain, part, ddown, dinject, dgain, programs: tl.int64, offset,
    n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    OF_STREAM: tl.constexpr, OF_ROW: tl.constexpr,
):  # fmt: skip
    # sums[i, j, d] = Σ_t e_j x̂_i,d / gain_i,d. Times the gain it is a weight's gradient, and times the weights the gain's.
    i, d = tl.program_id(1), tl.program_id(0) * BD + tl.arange(0, BD)
    S: tl.constexpr = n * D
    k = i * D + d
    weight = (load(gain + k, d < D) + offset)[None, :]
    acc = tl.zeros([BJ, BD], tl.float32)
    sums += i * OF_STREAM
    for start in range(0, R, BJ):
        acc += _rows_backward(sums, down, ddown, weight, start, R, k, d, S, D, BJ, OF_ROW)
    if M > 0:
        for start in range(0, M, BJ):
            acc += _rows_backward(sums + R * OF_ROW, inject, dinject, weight, start, M, k, d, S, D, BJ, OF_ROW)
    for start in range(0, programs, BJ):
        p = start + tl.arange(0, BJ)
        acc += load(part + p[:, None].to(tl.int64) * S + k[None, :], (p < programs)[:, None] & (d < D)[None, :])
    tl.store(dgain + k, tl.sum(acc, 0).to(dgain.dtype.element_ty), mask=d < D)


@triton.jit
def _streams_backward_kernel(
    x, z, r, gain, dh, dx, dnew, y, post, dy, dpost, offset,
    n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WRITE: tl.constexpr, HAS_NEXT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, BN), tl.arange(0, BD)
    ok = (i < n)[:, None] & (d < D)[None, :]
    place = i[:, None] * D + d[None, :]
    at = t * n * D + place
    v, a = load(x + at, ok), tl.sigmoid(load(z + at, ok))
    # No load is moved across the sums' barriers, so all of them stand before the first.
    if HAS_NEXT:
        of_next = tl.load(dnew + at, mask=ok, other=0.0)
    if WRITE:
        weights, output = load(post + t * n + i, i < n), tl.load(y + t * D + d, mask=d < D, other=0.0)
    scale = load(r + t * n + i, i < n)[:, None]
    # Gradient of r v: through the gated mean, and what dx holds, through the products, whose weights hold the gain.
    g = (load(dh + t * D + d, d < D) / n)[None, :] * a * (load(gain + place, ok) + offset) + load(dx + at, ok)
    g = scale * (g - v * (tl.sum(g * v, 1)[:, None] * scale * scale / D))
    if HAS_NEXT:
        g += of_next.to(tl.float32)
    tl.store(dx + at, g.to(dx.dtype.element_ty), mask=ok)
    if WRITE:
        out = tl.sum(g * weights[:, None], 0)
        tl.store(dy + t * D + d, out.to(dy.dtype.element_ty), mask=d < D)
        along = tl.sum(g * output.to(tl.float32)[None, :], 1)
        tl.store(dpost + t * n + i, along.to(dpost.dtype.element_ty), mask=i < n)


def _tile(x: Tensor) -> dict[str, int]:
    """Return the tile of a program that takes a whole token."""
    n, dim = x.shape[-2:]
    rows, columns = next_power_of_2(n), next_power_of_2(dim)
    # A thread has 64 bytes of every tensor, so that it asks for several pieces at once.
    warps = min(32, max(1, rows * columns * x.element_size() // 2048))
    return {"n": n, "BN": rows, "D": dim, "BD": columns, "num_warps": warps}


def _narrow_tile(x: Tensor) -> dict[str, int]:
    """Return the tile of a program that takes some channels of every stream."""
    n, dim = x.shape[-2:]
    rows, columns = next_power_of_2(n), min(CHANNELS, next_power_of_2(dim))
    return {"n": n, "BN": rows, "D": dim, "BD": columns, "num_warps": min(8, max(1, rows * columns // 512))}


def _columns(n: int, rank: int, writes: int) -> dict[str, int]:
    """Return the columns of the products with the normed streams."""
    padded = ALIGNED * cdiv(rank + writes, ALIGNED)
    return {"n": n, "P": padded, "BP": next_power_of_2(padded), "R": rank, "M": writes}


def _wide(multiply: Any, a: Tensor, b: Tensor) -> Tensor:
    """Multiply with a result in fp32, which only CUDA's products return directly."""
    if a.dtype == torch.float32:
        product: Tensor = multiply(a, b)
    elif a.is_cuda:
        product = multiply(a, b, out_dtype=torch.float32)
    else:
        product = multiply(a.float(), b.float())
    return product


def _fold(inputs: Inputs, offset: float) -> Tensor:
    """Return [P, n D]: W_down, W_inject and rows of zeros, times the gain. Made anew in the backward: it is as large as the weights."""
    x, gain, down, inject = inputs.x, inputs.gain, inputs.down, inputs.inject
    rank, width = down.shape
    writes = 0 if inject is None else x.shape[1]
    rows, block = _columns(x.shape[1], rank, writes)["P"], min(2048, next_power_of_2(width))
    folded = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    launch(
        _fold_kernel, (rows, cdiv(width, block)), x,
        down, down if inject is None else inject, gain, folded, offset, S=width, BS=block, R=rank, M=writes,
    )  # fmt: skip
    return folded


def forward(inputs: Inputs, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor | None, Kept]:
    """Compute x', h, the weights of the next write, and what the backward needs. All tensors are contiguous, and there are tokens."""
    x, y, post, gain, down, up, inject = inputs
    tokens, n, dim = x.shape
    rank, writes = down.shape[0], 0 if inject is None else n
    columns = _columns(n, rank, writes)
    new = x if y is None else torch.empty_like(x)
    r = torch.empty(tokens, n, dtype=torch.float32, device=x.device)
    given = (x if y is None else y, r if post is None else post)
    launch(_write_rms_kernel, (tokens,), x, x, *given, new, r, eps, WRITE=y is not None, **_tile(x))
    folded = _fold(inputs, offset)
    sums = _wide(torch.bmm, new.transpose(0, 1), folded.view(-1, n, dim).permute(1, 2, 0))
    t, u = (torch.empty(tokens, rank, dtype=x.dtype, device=x.device) for _ in range(2))
    next_post = None if inject is None else torch.empty(tokens, n, dtype=torch.float32, device=x.device)
    launch(
        _network_kernel, (tokens,), x,
        sums, r, t, u, r if next_post is None else next_post, tokens, num_warps=max(1, min(4, columns["BP"] // 128)), **columns,
    )  # fmt: skip
    del sums, folded
    z = torch.mm(u, up.t()).view_as(x)
    h = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    tile = _narrow_tile(x)
    launch(_gate_kernel, (tokens, cdiv(dim, tile["BD"])), x, z, new, r, gain, h, offset, **tile)
    return new, h, next_post, Kept(r, t, u, z)


class OutputGradients(NamedTuple):
    """Gradients of what a read returns; None: zeros."""

    new: Tensor | None  # of x'
    h: Tensor | None
    post: Tensor | None


def backward(
    inputs: Inputs,
    new: Tensor,
    next_post: Tensor | None,
    kept: Kept,
    grads: OutputGradients,
    offset: float,
    needed: Inputs,
) -> list[Tensor | None]:
    """Compute the gradients of the inputs, at least of those for which `needed` is True.

    Args:
        inputs: of the read.
        new: the streams after the write.
        next_post: the weights of the next write.
        kept: what `forward` returned for this.
        grads: of the read's outputs.
        offset: added to the gain.
        needed: whether an input needs a gradient.

    Returns:
        The gradients in the order of the inputs.
    """
    _, y, post, gain, down, up, inject = inputs
    dnew, dh, dnext = grads
    dh = new.new_zeros(len(new), new.shape[-1]) if dh is None else dh
    r, t, u, z = kept
    tokens, n, dim = new.shape
    rank, writes = down.shape[0], 0 if inject is None else n
    columns, narrow = _columns(n, rank, writes), _narrow_tile(new)
    of_products: Any = needed.gain or needed.down or needed.inject
    blocks = cdiv(dim, narrow["BD"])
    programs = min(tokens, cdiv(PROGRAMS * count_cores(new, on_cpu=2), blocks))
    part = torch.empty(programs if of_products else 0, n, dim, dtype=torch.float32, device=new.device)
    dz = torch.empty_like(new)
    launch(
        _gate_backward_kernel, (programs, blocks), new,
        z, new, r, gain, dh, dz, part, tokens, offset, GAIN=of_products, **narrow,
    )  # fmt: skip
    dz = dz.view(tokens, n * dim)
    dup = torch.mm(dz.t(), u) if needed.up else None
    du = torch.mm(dz, up)
    del dz
    e = torch.empty(tokens, columns["P"], dtype=new.dtype, device=new.device)
    # In fp16 a gradient times r could be too small a number: there the streams are scaled instead.
    by_stream = of_products and new.dtype != torch.float16
    scaled = torch.empty(n if by_stream else 0, *e.shape, dtype=new.dtype, device=new.device)
    if writes and dnext is None:
        assert next_post is not None
        dnext = torch.zeros_like(next_post)
    launch(
        _network_backward_kernel, (tokens,), new,
        du, t, r if next_post is None else next_post, r if dnext is None else dnext, r, e, scaled, tokens,
        SCALED=by_stream, num_warps=max(1, min(4, columns["BP"] // 128)), **columns,
    )  # fmt: skip
    ddown = dinject = dgain = None
    if of_products:
        sums = _sums(new, r, e, scaled if by_stream else None)
        ddown, dgain = torch.empty_like(down), torch.empty_like(gain)
        dinject = None if inject is None else torch.empty_like(inject)
        strides = (columns["P"] * dim, dim) if by_stream else (dim, n * dim)
        block = min(64, next_power_of_2(dim))
        launch(
            _weights_backward_kernel, (cdiv(dim, block), n), new,
            sums, down, down if inject is None else inject, gain, part, ddown, ddown if dinject is None else dinject, dgain,
            programs, offset, n=n, D=dim, BD=block, BJ=32, R=rank, M=writes, OF_STREAM=strides[0], OF_ROW=strides[1], num_warps=4,
        )  # fmt: skip
        del sums
    del scaled, part
    if not (needed.x or needed.y or needed.post):
        return [None, None, None, dgain, ddown, dup, dinject]
    dx = torch.mm(e, _fold(inputs, offset)).view_as(new)
    dy, dpost = (None if g is None else torch.empty_like(g) for g in (y, post))
    given = (new if dnew is None else dnew, new if y is None else y, r if post is None else post)
    launch(
        _streams_backward_kernel, (tokens,), new,
        new, z, r, gain, dh, dx, *given, new if dy is None else dy, r if dpost is None else dpost, offset,
        WRITE=y is not None, HAS_NEXT=dnew is not None, **_tile(new),
    )  # fmt: skip
    return [dx, dy, dpost, dgain, ddown, dup, dinject]


def _sums(x: Tensor, r: Tensor, e: Tensor, scaled: Tensor | None) -> Tensor:
    """Return Σ_t e_t r_t,i x_t,i in fp32: [n, P, D] from `scaled`, r times e, and otherwise [P, n D] from the normed streams."""
    if scaled is not None:
        return _wide(torch.bmm, scaled.transpose(1, 2), x.transpose(0, 1))
    normed = torch.mul(x, r.unsqueeze(-1), out=torch.empty_like(x))
    return _wide(torch.mm, e.t(), normed.flatten(1))
