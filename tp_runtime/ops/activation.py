"""The gated activation of the feed-forward block (Shazeer, 2020, "GLU Variants")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [tokens, 2 * n], gate columns first, as the fused projection writes them.

    Returns:
        [tokens, n], contiguous.
    """
    n = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :n]).mul_(gate_up[..., n:])
