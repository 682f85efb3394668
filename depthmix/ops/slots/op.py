"""Reads of decoding as PyTorch operators, for torch.compile and CUDA graphs. They change `slots` in place and have no gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.backend import choose, why_no_kernels
from depthmix.ops.checks import KERNEL_DTYPES, why_too_wide
from depthmix.ops.registration import register

# Up to this many tokens a launch takes longer than the memory traffic of its site.
STEP_TOKENS = 256
# Sites of a Full stack that read the sources before them together.
GROUP = 8
# Bytes that one launch may move to update the running softmax of all later readers, which then need not read the source.
PASS_BYTES = 1 << 22


def _contiguous(rows: Sequence[Tensor]) -> list[Tensor]:
    return [t.contiguous() for t in rows]


def _attend(
    slots: Tensor, y: Tensor, before: int, slot: int, stride: int, head: int, skip: int, n: int, query: list[Tensor],
    key_gain: list[Tensor], gain: list[Tensor], eps: float, out_eps: float, bank: Tensor | None, bank_lse: Tensor | None,
    scale: Tensor | None,
) -> Tensor:  # fmt: skip
    from depthmix.ops.slots import kernels

    partial = None if before < 0 else slots[before]
    rows = (_contiguous(query), _contiguous(key_gain), _contiguous(gain))
    return kernels.attend(
        slots, y.contiguous(), partial, slot, stride, head, skip, n, *rows, eps, out_eps, bank, bank_lse, scale
    )


def _attend_fake(
    slots: Tensor, y: Tensor, before: int, slot: int, stride: int, head: int, skip: int, n: int, query: list[Tensor],
    *others: Any,
) -> Tensor:  # fmt: skip
    return slots.new_empty(len(query), *y.shape)


def _look_back(slots: Tensor, n: int, query: Tensor, key_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from depthmix.ops.slots import kernels

    return kernels.look_back(slots, n, query.contiguous(), key_gain.contiguous(), eps)


def _look_back_fake(slots: Tensor, n: int, query: Tensor, key_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dim = slots.shape[-1]
    tokens, kind = slots[0].numel() // dim, torch.float32
    return slots.new_empty(len(query), tokens, dim, dtype=kind), slots.new_empty(len(query), tokens, dtype=kind)


def _add_up(
    slots: Tensor, y: Tensor, before: Tensor | None, slot: int, ways: int, static: Tensor | None, w: Tensor | None,
    relu: int, gain: list[Tensor], out_eps: float, raw: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from depthmix.ops.slots import kernels

    y, (before, static, w) = y.contiguous(), (None if t is None else t.contiguous() for t in (before, static, w))
    return kernels.add_up(slots, y, before, slot, ways, static, w, relu, _contiguous(gain), out_eps, raw)


def _add_up_fake(
    slots: Tensor, y: Tensor, before: Tensor | None, slot: int, ways: int, *others: Any
) -> tuple[Tensor, Tensor]:
    return slots.new_empty(ways, *y.shape), slots.new_empty(y.shape)


def _pass_on(
    slots: Tensor, acc: Tensor, stats: Tensor, y: Tensor, before: int, slot: int, stride: int, begin: int, end: int, query: Tensor,
    key_gain: Tensor, further_query: Tensor | None, further_key_gain: Tensor | None, further_at: int, further_begin: int, further_end: int,
    ways: int, gain: list[Tensor], eps: float, out_eps: float, scale: Tensor | None,
) -> Tensor:  # fmt: skip
    from depthmix.ops.slots import running_softmax

    partial = None if before < 0 else slots[before]
    further = [None if t is None else t.contiguous() for t in (further_query, further_key_gain)]
    return running_softmax.pass_on(
        slots, acc, stats, y.contiguous(), partial, slot, stride, begin, end, query.contiguous(), key_gain.contiguous(), further[0],
        further[1], further_at, further_begin, further_end, ways, _contiguous(gain), eps, out_eps, scale,
    )  # fmt: skip


def _pass_on_fake(slots: Tensor, acc: Tensor, stats: Tensor, y: Tensor, *others: Any) -> Tensor:
    ways: int = others[12]
    return slots.new_empty(ways, *y.shape)


def _add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, keep: bool = True) -> tuple[Tensor, Tensor]:
    from depthmix.ops.slots import kernels

    y = None if y is None else y.contiguous()
    total, out = kernels.add_norm(x.contiguous(), y, gain.contiguous(), eps, keep)
    return x.new_empty(0) if total is None else total, out


def _add_norm_fake(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, keep: bool = True) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if keep and y is not None else 0), x.new_empty(x.shape)


register(
    "slots_attend(Tensor(a!) slots, Tensor y, int before, int slot, int stride, int head, int skip, int n, Tensor[] query,"
    " Tensor[] key_gain, Tensor[] gain, float eps, float out_eps, Tensor? bank, Tensor? bank_lse, Tensor? scale) -> Tensor",
    _attend,
    _attend_fake,
)
register(
    "slots_look_back(Tensor slots, int n, Tensor query, Tensor key_gain, float eps) -> (Tensor, Tensor)",
    _look_back,
    _look_back_fake,
)
register(
    "slots_add_up(Tensor(a!) slots, Tensor y, Tensor? before, int slot, int ways, Tensor? static, Tensor? w, int relu,"
    " Tensor[] gain, float out_eps, int raw) -> (Tensor, Tensor)",
    _add_up,
    _add_up_fake,
)
register(
    "slots_pass_on(Tensor(a!) slots, Tensor(b!) acc, Tensor(c!) stats, Tensor y, int before, int slot, int stride, int begin, int end,"
    " Tensor query, Tensor key_gain, Tensor? further_query, Tensor? further_key_gain, int further_at, int further_begin,"
    " int further_end, int ways, Tensor[] gain, float eps, float out_eps, Tensor? scale) -> Tensor",
    _pass_on,
    _pass_on_fake,
)
register(
    "slots_add_norm(Tensor x, Tensor? y, Tensor gain, float eps, bool keep=True) -> (Tensor, Tensor)",
    _add_norm,
    _add_norm_fake,
)


def usable(op: str, x: Tensor) -> bool:
    """Return whether a pass that begins with x can run on the decoding kernels: no gradients, no compiler, kernels available."""
    # The type check excludes DTensor and the like.
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    # x may be a leaf whose gradient the caller wants later. Slots hold copies of x, which would cut it off.
    if x.requires_grad:
        return False
    if x.dtype not in KERNEL_DTYPES or why_too_wide(x.shape[-1]) is not None:
        return False
    return why_no_kernels(x.device.type, x.device.index) is None and choose(op, x, None) == "triton"


def few_tokens(x: Tensor) -> bool:
    """Return whether x has so few tokens that launches take longer than memory traffic."""
    return x.numel() <= STEP_TOKENS * x.shape[-1]


def attend(
    slots: Tensor,
    y: Tensor,
    before: int,
    slot: int,
    stride: int,
    head: int,
    skip: int,
    n: int,
    query: Sequence[Tensor],
    key_gain: Sequence[Tensor],
    gain: Sequence[Tensor],
    eps: float,
    out_eps: float,
    bank: Tensor | None = None,
    bank_lse: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Run kernels.attend.

    before: the slot whose tensor is added to y, or -1. slots: contiguous [slots, ..., D].
    """
    out: Tensor = torch.ops.depthmix.slots_attend(
        slots, y, before, slot, stride, head, skip, n, query, key_gain, gain, eps, out_eps, bank, bank_lse, scale
    )
    return out


def pass_on(
    slots: Tensor,
    running: tuple[Tensor, Tensor],
    y: Tensor,
    before: int,
    slot: int,
    stride: int,
    later_readers: range,
    query: Tensor,
    key_gain: Tensor,
    further: tuple[Tensor, Tensor] | None,
    further_at: int,
    further_readers: range,
    ways: int,
    gain: Sequence[Tensor],
    eps: float,
    out_eps: float,
    scale: Tensor | None = None,
) -> Tensor:
    """Run running_softmax.pass_on.

    before: as in attend. later_readers, further_readers: those whose running mixtures are updated.
    """
    out: Tensor = torch.ops.depthmix.slots_pass_on(
        slots, *running, y, before, slot, stride, later_readers.start, later_readers.stop, query, key_gain, *(further or (None, None)),
        further_at, further_readers.start, further_readers.stop, ways, gain, eps, out_eps, scale,
    )  # fmt: skip
    return out


def running(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Allocate running mixtures for `rows` readers of tokens x: sums [rows, N, D], and maxima and weights [2, rows, N]."""
    acc = torch.empty(rows, x.numel() // x.shape[-1], x.shape[-1], dtype=torch.float32, device=x.device)
    return acc, torch.empty(2, *acc.shape[:2], dtype=torch.float32, device=x.device)


def passes_on(x: Tensor, rows: int) -> bool:
    """Return whether each source may update all later readers at once: half of `rows` on average, read and written in fp32."""
    return rows // 2 * x.numel() * 8 <= PASS_BYTES


def look_back(slots: Tensor, n: int, query: Tensor, key_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Run kernels.look_back."""
    out: tuple[Tensor, Tensor] = torch.ops.depthmix.slots_look_back(slots, n, query, key_gain, eps)
    return out


def add_up(
    slots: Tensor,
    y: Tensor,
    before: Tensor | None,
    slot: int,
    ways: int,
    static: Tensor | None,
    w: Tensor | None,
    relu: int,
    gain: Sequence[Tensor],
    out_eps: float,
    raw: int = -1,
) -> tuple[Tensor, Tensor]:
    """Run kernels.add_up."""
    out: tuple[Tensor, Tensor] = torch.ops.depthmix.slots_add_up(
        slots, y, before, slot, ways, static, w, relu, gain, out_eps, raw
    )
    return out


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    """Return x + y, rounded (x itself without y), and its RMSNorm, rounded, from one launch for any number of tokens.

    keep=False: nobody else reads the sum. It is neither rounded nor returned.
    """
    total, out = torch.ops.depthmix.slots_add_norm(x, y, gain, eps, keep)
    return (x if y is None else total) if keep else None, out


def rows_at_once(dim: int) -> int:
    """Return how many sources one launch holds at once. Up to this many, two phases save nothing."""
    from depthmix.ops.slots import kernels

    return kernels.rows_at_once(dim)
