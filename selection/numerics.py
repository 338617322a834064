"""The numeric gate: a backend is timed only after it matched plain float32 attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tp_runtime.selection.base import DecodeStep, PagedKV

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeBackend, DecodeShape

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
# largest allowed difference for values of unit scale
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3, "float8_e4m3fn": 8e-2}
_GATE_PAGES = 3  # longest row of the gate, in pages
_GATE_TOKENS = 3000  # the same on a GPU, where rows must be long enough to be split


@dataclass(frozen=True, slots=True, kw_only=True)
class GateBatch:
    """A small ragged batch with garbage wherever a backend must not look.

    Table entries beyond a row name pages full of NaN, and so are the unused tokens of last pages.
    """

    shape: DecodeShape
    step: DecodeStep
    q: Tensor
    kv: PagedKV

    @classmethod
    def random(cls, shape: DecodeShape, rows: int, device: torch.device, *, seed: int) -> GateBatch:
        rng = np.random.default_rng(seed)
        generator = torch.Generator(device).manual_seed(seed)
        page = shape.page_size
        longest = min(shape.max_kv_len, _GATE_PAGES * page)
        if device.type == "cuda":
            longest = min(shape.max_kv_len, max(longest, _GATE_TOKENS))
        lengths = rng.integers(shape.q_len, longest + 1, rows).astype(np.int32)
        used = -(-lengths // page)
        total = int(used.sum())
        size = (total + 1, shape.kv_heads, page, shape.head_dim)
        k, v = (torch.randn(size, generator=generator, device=device) for _ in range(2))
        order = torch.from_numpy(rng.permutation(total).astype(np.int32))
        table = torch.full((rows, shape.table_width), total, dtype=torch.int32)
        start = 0
        for row, count in enumerate(used.tolist()):
            table[row, :count] = order[start : start + count]
            tail = int(lengths[row]) - (count - 1) * page
            for pages in (k, v):
                pages[int(table[row, count - 1]), :, tail:] = torch.nan
            start += count
        k[total] = v[total] = torch.nan
        heads = (rows * shape.q_len, shape.q_heads, shape.head_dim)
        q = torch.randn(heads, generator=generator, device=device)
        kv_dtype = DTYPES[shape.kv_dtype or shape.dtype]
        return cls(
            shape=shape,
            step=DecodeStep(batch_size=rows, bucket=rows, kv_lens=lengths),
            q=q.to(DTYPES[shape.dtype]),
            kv=PagedKV(
                k=k.to(kv_dtype),
                v=v.to(kv_dtype),
                block_table=table.to(device),
                kv_lens=torch.from_numpy(lengths).to(device),
            ),
        )

    def expected(self) -> Tensor:
        """Plain attention, row by row, in float32."""
        shape = self.shape
        heads, group, dim = shape.kv_heads, shape.group_size, shape.head_dim
        out = torch.empty(self.q.shape, dtype=torch.float32, device=self.q.device)
        all_k, all_v = self.kv.k.float(), self.kv.v.float()
        for row, length in enumerate(self.step.kv_lens.tolist()):
            pages = self.kv.block_table[row, : -(-length // shape.page_size)].long()
            k, v = (
                p[pages].transpose(0, 1).reshape(heads, -1, dim)[:, :length] for p in (all_k, all_v)
            )
            for place in range(shape.q_len):
                token = row * shape.q_len + place
                seen = length - (shape.q_len - 1 - place)
                q = self.q[token].float().view(heads, group, dim) * dim**-0.5
                weights = torch.softmax(q @ k[:, :seen].transpose(1, 2), -1)
                out[token] = (weights @ v[:, :seen]).reshape(heads * group, dim)
        return out


def mismatch(batch: GateBatch, backend: DecodeBackend) -> str | None:
    """How a backend's result differs from plain attention, or None if it matches."""
    out = torch.full_like(batch.q, torch.nan)
    backend.prepare_for_capture(batch.step.batch_size)
    backend.prepare(batch.step)
    backend.forward(batch.q, batch.kv, out)
    if not bool(out.isfinite().all()):
        return f"{int((~out.isfinite()).sum())} of {out.numel()} results are not finite"
    difference = float((out.float() - batch.expected()).abs().max())
    allowed = TOLERANCE[batch.shape.dtype]
    if batch.shape.kv_dtype is not None:
        allowed = max(allowed, TOLERANCE[batch.shape.kv_dtype])
    if difference > allowed:
        return f"differs from float32 attention by {difference:.2g}, allowed {allowed:g}"
    return None
