"""All ranks of a tensor-parallel group in one process, one thread each, and a dense attention."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.nn.functional as F

from tp_runtime.ops.norm import rms_norm
from tp_runtime.ops.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tp_runtime.group import TpGroup
    from tp_runtime.models.base import QkNorm


T = TypeVar("T")


class FakeGroup:
    """One member. `all_reduce` meets the others at a barrier and sums in rank order."""

    def __init__(
        self, rank: int, size: int, slots: list[Tensor], barrier: threading.Barrier
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self.reduced = 0
        self._slots = slots
        self._barrier = barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.reduced += 1
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait()
        total = self._slots[0].clone()
        for part in self._slots[1:]:
            total += part
        self._barrier.wait()
        return tensor.copy_(total)

    def all_reduce_norm(
        self, tensor: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """Makes the norm, as GPUs that share memory do; real ranks on a CPU leave it to others."""
        total = self.all_reduce(tensor)
        return total, rms_norm(total, weight, eps)


def on_ranks(size: int, body: Callable[[TpGroup], T]) -> list[T]:
    """body(group) on every rank of a fake group; results in rank order."""
    barrier = threading.Barrier(size, timeout=60)
    slots: list[Tensor] = [torch.empty(0)] * size

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return body(cast("TpGroup", FakeGroup(rank, size, slots, barrier)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        # a rank that only waited for the one that failed says nothing new
        raise min(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]


class DenseAttention:
    """Causal attention over all tokens of one sequence; keeps k and v of earlier calls."""

    def __init__(self, num_layers: int, kv_heads: int) -> None:
        self._kv_heads = kv_heads
        self._k: list[Tensor | None] = [None] * num_layers
        self._v: list[Tensor | None] = [None] * num_layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past_k, past_v = self._k[layer], self._v[layer]
        k = k if past_k is None else torch.cat([past_k, k])
        v = v if past_v is None else torch.cat([past_v, v])
        self._k[layer], self._v[layer] = k.clone(), v.clone()
        tokens, total = q.shape[0], k.shape[0]
        mask = torch.ones(tokens, total, dtype=torch.bool).tril(total - tokens)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        return out.transpose(0, 1)

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: QkNorm | None
    ) -> Tensor:
        head_dim = cos.shape[-1]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q_heads = heads.shape[1] - 2 * self._kv_heads
        q, k, v = torch.split(heads, [q_heads, self._kv_heads, self._kv_heads], 1)
        if norms is not None:
            q, k = (
                rms_norm(t, weight, norms.eps)
                for t, weight in ((q, norms.q_weight), (k, norms.k_weight))
            )
        return self(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
