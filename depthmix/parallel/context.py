"""Context parallelism: a process holds a part of every sequence, and its queries attend to the keys and values of all
parts.

A sequence is cut into 2 cp chunks, and process r of cp takes chunks r and 2 cp - 1 - r: under a causal mask chunk j looks at j + 1
chunks, so that every process has the same work, 2 cp + 1 of them (Llama 3, arXiv 2407.21783, section 3.3.2, does the same).

    k, v  = gathered, in the order of the sequence                                      [B, kv heads, T, d]
    y_j   = attention of the queries of chunk j to the first j + 1 chunks of k, v       [B, heads, T / (2 cp), d]

A chunk's queries are the last ones of the keys they look at: torch's attention takes that as a mask that is nowhere written out
(`causal_lower_right`). The gradients of k and v are summed where they came from, by autograd. Everything else is token-local, mixing
over depth too, and for parameters and the loss these processes are as good as data-parallel ones.

Torch's own (`torch.distributed.tensor.experimental.context_parallel`) has no attention for CPUs: docs/guides/several-gpus.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from depthmix.models import Decoder
from depthmix.models.layers import Attention, Context, last_tokens
from depthmix.parallel.share import Share


@dataclass(frozen=True)
class SharedAttention:
    """Attention of this process's tokens to the tokens of all processes."""

    mesh: DeviceMesh
    share: Share

    def __call__(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Apply attention like `scaled_dot_product`: q [B, heads, T / cp, d], k and v [B, kv heads, T / cp, d] to [B, T
        / cp, heads, d].
        """
        k, v = self.gather(torch.stack([k, v])).unbind()
        length = q.shape[2] // 2
        outputs = []
        for chunk, chunk_q, mask in zip(self.share.chunks, q.split(length, dim=2), context.mask, strict=True):
            n_keys = (chunk + 1) * length
            y = functional.scaled_dot_product_attention(
                chunk_q,
                k[:, :, :n_keys],
                v[:, :, :n_keys],
                attn_mask=mask,
                is_causal=mask is None and length > 1,
                enable_gqa=attention.num_key_value_groups > 1,
            )
            outputs.append(y)
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def masks(self, n_tokens: int) -> tuple[Any, ...]:
        """Return the mask argument of `attend`: one mask for each chunk of `n_tokens` tokens. Masks are made outside
        compiled code.
        """
        length = n_tokens // 2
        return tuple(last_tokens(length, (chunk + 1) * length) for chunk in self.share.chunks)

    def gather(self, kv: Tensor) -> Tensor:
        """Gather keys and values [2, B, heads, T / cp, d] of this process to [2, B, heads, T, d] of all."""
        parts = DTensor.from_local(kv.unsqueeze(0), self.mesh, [Shard(0)], run_check=False)
        every = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return self.share.put_together(every.unbind(), dim=-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Let a decoder take its part of every sequence: positions are those in the whole, and attention sees all of it."""
    share = Share(mesh.get_local_rank(), mesh.size())
    attend, alone = SharedAttention(mesh, share), model._context

    def context(x: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Any) -> Context:
        if mask is not None or cache is not None:
            raise ValueError("context parallelism is for training: it takes neither a mask nor a cache")
        n_tokens = x.shape[1]
        if positions is None:
            positions = share.of(torch.arange(n_tokens * share.count, device=x.device), dim=0).unsqueeze(0)
        return dataclasses.replace(alone(x, None, positions, None), mask=attend.masks(n_tokens), attend=attend)

    model._context = context  # type: ignore[method-assign]
