"""The kernel forms of `tp_runtime.ops.sampling`: no float32 copy of the logits, no sort.

The choice rule is the one there. Scores may differ from the torch forms in the last bit of a
logarithm, so that the choice may differ where the two best scores are that close. Weights for
top-p are integers of 2**-44 times the largest: sums are exact, whatever their order.

All shapes follow from those of the arguments and nothing waits for the device, so that calls can
be captured; outside a capture they return tensors of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from tp_runtime.ops.kernels import dependent_launch, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK: Final = 1024  # columns of a program at a time
_PROGRAMS: Final = 1056  # what a device holds at once; more rows give each program more columns
_MOST_PARTS: Final = 512
# of a float32: the last bits that logits of a 16-bit type leave at zero
_UNUSED_BITS: Final = {torch.bfloat16: 16, torch.float16: 13}


def best_keys(
    logits: Tensor,
    vocab_start: int,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """The best key of this rank's slice: of the noisy scores, or of the logits themselves.

    Args:
        logits: [rows, vocab_local] in a float dtype, the last dimension contiguous.
        vocab_start: global id of the first column.
        temperature: float32 [rows], contiguous; None for the best logits, whatever seed and
            position.
        seed, position: int64 [rows], contiguous.

    Returns:
        int64 [rows]: keys as `sampling._encode` packs them, of which the largest over the ranks
        is the row's; `tokens_of_keys` unpacks it.
    """
    parts, steps = _split(logits)
    keys = _part_keys(logits, vocab_start, temperature, seed, position, parts=parts, steps=steps)
    return _reduce(keys, rows=logits.shape[0], parts=parts, row_stride=parts, part_stride=1)


def best_tokens(
    logits: Tensor,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """`best_keys` of a whole vocabulary, unpacked: int64 [rows] ids, or INVALID_TOKEN."""
    parts, steps = _split(logits)
    keys = _part_keys(logits, 0, temperature, seed, position, parts=parts, steps=steps)
    return _reduce(
        keys, rows=logits.shape[0], parts=parts, row_stride=parts, part_stride=1, decode=True
    )


def tokens_of_keys(keys: Tensor) -> Tensor:
    """Keys of all ranks, int64 [size, rows] contiguous, to tokens int64 [rows]."""
    size, rows = keys.shape
    return _reduce(keys, rows=rows, parts=size, row_stride=1, part_stride=rows, decode=True)


def filtered(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """See `tp_runtime.ops.sampling.filtered`; logits in any float dtype."""
    from tp_runtime.ops.kept_kernel import kept_keys_kernel, ties_kernel

    rows, vocab = logits.shape
    if rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    temperature, top_k, top_p, min_p, seed, position = (
        t.contiguous() for t in (temperature, top_k, top_p, min_p, seed, position)
    )
    parts, steps = _split(logits)
    grid, stride, common = (parts, rows), logits.stride(0), _common(logits.device)
    best, state = find_cut(logits, temperature, top_k, top_p)
    ties = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    ties_kernel[grid](
        logits, state, ties, stride, vocab, steps, BLOCK=_BLOCK, num_warps=4, **common
    )
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    kept_keys_kernel[grid](
        logits, best, temperature, min_p, seed, position, state, ties, keys, stride, vocab, steps,
        BLOCK=_BLOCK, BLOCK_PARTS=power_of_two(parts), num_warps=4, **common,
    )  # fmt: skip
    return _reduce(keys, rows=rows, parts=parts, row_stride=parts, part_stride=1, decode=True)


def find_cut(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Where top-k and top-p end: (int64 [rows] best keys, int64 [rows, 16] states).

    Column 6 of a state is the key at the cut, rising as logits fall, and column 7 how many ids
    with that key are kept, lowest first, -1 for all; see `filter_keys`.
    """
    from tp_runtime.ops import filter_kernel as kernels
    from tp_runtime.ops.filter_keys import HIST_WIDTH, STATE_WIDTH

    rows, vocab = logits.shape
    parts, steps = _split(logits)
    hist = torch.zeros((rows, HIST_WIDTH), dtype=torch.int64, device=logits.device)
    state = torch.empty((rows, STATE_WIDTH), dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    params = (best, temperature, top_k, top_p, state, hist)
    grid, stride, common = (parts, rows), logits.stride(0), _common(logits.device)
    drop = _UNUSED_BITS.get(logits.dtype, 0)
    blocks = -(-vocab // _BLOCK)
    block_keys = _part_keys(logits, 0, None, None, None, parts=blocks, steps=1)
    kernels.limits_kernel[(rows,)](
        block_keys, temperature, top_k, top_p, best, state, blocks, vocab,
        BLOCKS_POW2=power_of_two(blocks), DROP=drop, num_warps=4, **common,
    )  # fmt: skip
    later = (3,) if drop else (2, 3)
    for for_k, levels in ((True, (1, *later)), (False, later)):
        for level in levels:
            kernels.histogram_kernel[grid](
                logits, *params, stride, vocab, steps,
                LEVEL=level, FOR_K=for_k, DROP=drop, BLOCK=_BLOCK, num_warps=4, **common,
            )  # fmt: skip
            kernels.cut_kernel[(rows,)](
                *params, vocab, LEVEL=level, FOR_K=for_k, DROP=drop, num_warps=8, **common
            )  # fmt: skip
    return best, state


def _common(device: torch.device) -> dict[str, bool]:
    """Options of every launch here. A product fused with a sum is rounded once, in torch twice."""
    pdl = dependent_launch(device)
    return {"PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": False}


def _split(logits: Tensor) -> tuple[int, int]:
    """How many programs share a row, and how many blocks each of them reads."""
    rows, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    parts = max(1, min(blocks, _PROGRAMS // max(rows, 1), _MOST_PARTS))
    steps = -(-blocks // parts)
    return -(-blocks // steps), steps


def _part_keys(
    logits: Tensor,
    vocab_start: int,
    temperature: Tensor | None,
    seed: Tensor | None,
    position: Tensor | None,
    *,
    parts: int,
    steps: int,
) -> Tensor:
    from tp_runtime.ops.sampling_kernel import best_keys_kernel

    rows, vocab = logits.shape
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    best_keys_kernel[(parts, rows)](
        logits,
        keys if temperature is None else temperature,
        keys if seed is None else seed,
        keys if position is None else position,
        keys,
        logits.stride(0),
        vocab,
        vocab_start,
        steps,
        RANDOM=temperature is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        **_common(logits.device),
    )
    return keys


def _reduce(
    keys: Tensor, *, rows: int, parts: int, row_stride: int, part_stride: int, decode: bool = False
) -> Tensor:
    from tp_runtime.ops.sampling_kernel import reduce_keys_kernel

    out = torch.empty(rows, dtype=torch.int64, device=keys.device)
    reduce_keys_kernel[(rows,)](
        keys,
        out,
        parts,
        row_stride,
        part_stride,
        DECODE=decode,
        BLOCK=power_of_two(parts),
        num_warps=1,
        **_common(keys.device),
    )
    return out
