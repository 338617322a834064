"""Chooses how a model's products run: on rank 0, for every rank.

Without the dynamic selection a table of what was measured on an H200 decides, so that nothing is
measured at a start; with it every candidate is timed on rank 0's device.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tp_runtime.choices import follow_choice, lead_choice
from tp_runtime.errors import PlanFormatError
from tp_runtime.layers.products import Product, ProductPlan, TunedModel, rows_needed
from tp_runtime.ops.kernels import dependent_launch, runs_kernels
from tp_runtime.ops.skinny_config import SkinnyConfig, usual

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tp_runtime.broadcast import CpuTpBroadcaster
    from tp_runtime.group import TpGroup
    from tp_runtime.models.base import DecodeModel

log = logging.getLogger(__name__)

_VERB = "multiply as rank 0 chose"


def tune(
    model: DecodeModel,
    channel: CpuTpBroadcaster,
    group: TpGroup,
    *,
    most_rows: int,
    measured: bool,
    timeout_s: float,
    progress: Callable[[str, int, int], None],
) -> ProductPlan | None:
    """Choose and use; all ranks call it together. None where nothing can be chosen.

    Args:
        most_rows: the largest decode batch.
        measured: time the candidates instead of looking them up.
        timeout_s: for the ranks that wait for rank 0.
        progress: called with ("products", done, in all); rank 0's also sends it to the others.

    Raises:
        BroadcastError: a rank was lost, also while rank 0 measured.
        PlanMismatch: a rank has other products than rank 0.
    """
    if not isinstance(model, TunedModel) or not runs_kernels(group.device):
        return None
    dtype = model.shape.dtype
    products = tuple(dict.fromkeys((*model.layer_products.values(), *model.other_products)))
    if group.rank == 0:
        early = dependent_launch(group.device)
        choose = _usual(dtype, early)
        if measured and early:  # the candidates are those of GPUs with dependent launches
            total = len(products) * len(rows_needed(most_rows))
            choose = _measured(model, dtype, group, lambda done: progress("products", done, total))
        plan = ProductPlan.of(products, choose, most_rows=most_rows)
        log.info("products: %s", plan.to_message())
        lead_choice(channel, "products", plan.to_message(), verb=_VERB, timeout_s=timeout_s)
    else:
        plan = _follow(channel, products, timeout_s, progress)
    model.use_products(plan)
    return plan


def _usual(
    dtype: torch.dtype, dependent_launch: bool
) -> Callable[[Product, int], SkinnyConfig | None]:
    def choose(product: Product, rows: int) -> SkinnyConfig | None:
        return usual(
            product.op,
            rows=rows,
            n=product.n,
            k=product.k,
            dtype=dtype,
            dependent_launch=dependent_launch,
        )

    return choose


def _measured(
    model: TunedModel,
    dtype: torch.dtype,
    group: TpGroup,
    progress: Callable[[int], None],
) -> Callable[[Product, int], SkinnyConfig | None]:
    """Time the products of a layer in a chain of the model's own layers, and the others alone."""
    from tp_runtime.ops.skinny_layer import choose_layer
    from tp_runtime.ops.skinny_measure import SkinnyShape, best, measure

    layers = model.layer_products
    of_layer: dict[tuple[Product, int], SkinnyConfig | None] = {}
    done = 0

    def choose(product: Product, rows: int) -> SkinnyConfig | None:
        nonlocal done
        if (product, rows) not in of_layer and product in layers.values():
            chosen = choose_layer(model.layer_matrices, rows=rows, ranks=group.size)
            for name, each in layers.items():
                of_layer[each, rows] = getattr(chosen, name)
        done += 1
        progress(done)
        if (product, rows) in of_layer:
            return of_layer[product, rows]
        shape = SkinnyShape(
            op=product.op, rows=rows, n=product.n, k=product.k, dtype=dtype, bias=product.bias
        )
        return best(measure(shape, group.device))

    return choose


def _follow(
    channel: CpuTpBroadcaster,
    products: tuple[Product, ...],
    timeout_s: float,
    progress: Callable[[str, int, int], None],
) -> ProductPlan:
    def read(message: object) -> ProductPlan:
        plan = ProductPlan.from_message(message)
        if set(plan.choices) != set(products):
            raise PlanFormatError(
                f"expected {sorted(map(str, products))}, got {sorted(map(str, plan.choices))}"
            )
        return plan

    return follow_choice(
        channel, "products", read, verb=_VERB, timeout_s=timeout_s, progress=progress
    )
