"""Decoding: prompts in chunks, then token by token. On a GPU a step is one replay of a CUDA graph.

Depth mixing is token-local, so the depth state of a chunk is freed before the next chunk: a long prompt needs memory for its keys
and values and for the activations of one chunk. Logits are computed for the last token only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthmix.models.cache import StaticKVCache
from depthmix.models.decoder import Decoder
from depthmix.models.layers import Context, last_tokens
from depthmix.ops.gpu.recording import recorded

# Prompt tokens per pass: enough for efficient matrix products, and few enough for a depth state of many sources.
CHUNK = 2048
WARMUP = 2  # steps before the recording


class Decoding:
    """Continue a batch of sequences of equal length together."""

    def __init__(self, model: Decoder, batch: int, length: int, chunk: int = CHUNK) -> None:
        """Allocate the cache.

        Args:
            model: The decoder, which is put in eval mode.
            batch: Number of sequences.
            length: Maximum tokens of a sequence, prompt included.
            chunk: Prompt tokens per forward pass.
        """
        config, weight = model.config, model.embedding.weight
        slots = -(-length // 16) * 16  # attention would pad masks of other lengths at every step
        self.model, self.chunk, self.length = model.eval(), chunk, length
        shape = (config.n_blocks, batch, config.n_kv_heads, slots, config.head_dim)
        self.cache = StaticKVCache(*shape, weight.dtype, weight.device)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.places = torch.arange(slots, device=weight.device)
        with torch.no_grad():
            self.cos, self.sin = model.rotary(self.places.unsqueeze(0))  # [1, 1, slots, d]
        self.seen, self.hidden = (torch.tensor(x, dtype=weight.dtype, device=weight.device) for x in (0.0, -torch.inf))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.constants: Any = None  # tensors that the graph reads and never writes

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        """Append prompt tokens and return the logits of the next token.

        Args:
            ids: Token ids [B, T], following the tokens seen so far.

        Returns:
            Logits [B, V] after the last token.

        Raises:
            ValueError: The shape differs, or the tokens do not fit into the cache.
        """
        if ids.ndim != 2 or len(ids) != len(self.ids):
            raise ValueError(f"decoding: expected token ids of shape [{len(self.ids)}, T], got {list(ids.shape)}")
        self._check(ids.shape[1])
        hidden = self.ids.new_zeros(0)
        for part in ids.split(self.chunk, dim=1):
            hidden = self._through_blocks(part)[:, -1]
            self.cache.advance(part.shape[1])
        return self.model.head(hidden)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Append one token per sequence and return the logits of the next.

        Args:
            ids: Token ids [B].

        Returns:
            Logits [B, V]. The next step writes to the same memory.

        Raises:
            ValueError: The shape differs, or the cache is full.
        """
        if ids.numel() != len(self.ids):
            raise ValueError(f"decoding: expected one token for each of {len(self.ids)}, got {list(ids.shape)}")
        self._check(1)
        self.ids.copy_(ids.view(-1, 1))
        if self.ids.is_cuda:
            if self.graph is None:
                self._record()
            assert self.graph is not None
            self.graph.replay()
        else:
            self.logits = self._step()
        self.cache.filled += 1
        return self.logits

    def _check(self, tokens: int) -> None:
        if tokens < 1 or self.cache.filled + tokens > self.length:
            room = f"there is room for {self.length - self.cache.filled} more of {self.length}"
            raise ValueError(f"decoding: expected at least one token, and {room}; got {tokens}")

    def _through_blocks(self, ids: Tensor) -> Tensor:
        """Return the head's input for the last token [B, 1, D]."""
        tokens, past = ids.shape[1], self.cache.filled
        if tokens == 1:  # indexed by the position on the device, which a replay reads
            cos, sin = (t.index_select(2, self.cache.position) for t in (self.cos, self.sin))
            mask: Any = torch.where(self.places <= self.cache.position, self.seen, self.hidden)[None, None, None]
        else:
            cos, sin = (t[:, :, past : past + tokens] for t in (self.cos, self.sin))
            mask = last_tokens(tokens, past + tokens)
        x, context = self.model.embed(ids, None), Context(cos, sin, mask, self.cache)
        return self.model.through_blocks(x, self.model.with_ids(context, ids), last=1)

    def _step(self) -> Tensor:
        logits = self.model.head(self._through_blocks(self.ids)[:, -1])
        self.cache.position += 1
        return logits

    def _record(self) -> None:
        device, place = self.ids.device, self.cache.position.clone()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                self._step()
                self.cache.position.copy_(place)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with recorded(self.graph, side) as self.constants:
            self.logits = self._step()
