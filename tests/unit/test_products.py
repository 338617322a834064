"""Which kernel runs a product: what is decided, how it travels, and who has to agree."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import torch

from tests.shrunk import shrunk_model
from tp_runtime import tuning
from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster
from tp_runtime.errors import PlanFormatError, PlanMismatch
from tp_runtime.group import TpGroup
from tp_runtime.layers.products import (
    NO_CONFIGS,
    ROWS,
    Product,
    ProductPlan,
    TunedModel,
    config_for,
    rows_needed,
)
from tp_runtime.ops.skinny_config import SkinnyConfig, SkinnyOp

if TYPE_CHECKING:
    from pathlib import Path

HEAD = Product(op=SkinnyOp.NORM_LINEAR, n=512, k=64)
DOWN = Product(op=SkinnyOp.LINEAR_RESIDUAL, n=64, k=128)


def numbered(product: Product, rows: int) -> SkinnyConfig | None:
    """A configuration that shows what it was asked for; none for four rows."""
    return None if rows == 4 else SkinnyConfig(kernel="dot", block_n=rows, block_k=product.k)


def test_a_product_takes_the_choice_of_the_next_number_of_rows() -> None:
    plan = ProductPlan.of([HEAD], numbered, most_rows=9)
    assert rows_needed(9) == (1, 2, 4, 8, 16)
    configs = plan.configs(HEAD)
    chosen = [config_for(configs, rows) for rows in range(1, 20)]
    expected = [1, 2, None, None, *[8] * 4, *[16] * 8, *[None] * 3]
    assert [None if c is None else c.block_n for c in chosen] == expected
    assert config_for(NO_CONFIGS, 1) is None


def test_rows_beyond_the_kernels_are_not_asked_for() -> None:
    assert rows_needed(1) == (1,)
    assert rows_needed(1000) == ROWS


def test_a_plan_travels_and_keeps_its_digest() -> None:
    plan = ProductPlan.of([HEAD, DOWN], numbered, most_rows=8)
    packed = msgpack.packb(plan.to_message())
    again = ProductPlan.from_message(msgpack.unpackb(packed))
    assert again == plan
    assert again.digest == plan.digest
    assert ProductPlan.of([HEAD, DOWN], numbered, most_rows=4).digest != plan.digest


@pytest.mark.parametrize(
    "message",
    [None, 3, [None], [{"op": "linear"}], [{"op": "x", "n": 1, "k": 1, "bias": False}]],
)
def test_what_is_no_plan_is_refused(message: object) -> None:
    with pytest.raises(PlanFormatError, match="expected a plan of products"):
        ProductPlan.from_message(message)


def test_the_model_names_its_products_and_takes_a_plan() -> None:
    model = shrunk_model(
        "llama-3-8b", group=TpGroup.single(torch.device("cpu")), dtype=torch.float32
    )
    assert isinstance(model, TunedModel)
    assert list(model.layer_products) == ["qkv", "output", "gate_up", "down"]
    products = (*model.layer_products.values(), *model.other_products)
    for name, product in model.layer_products.items():
        weight = getattr(model.layer_matrices[0], name)
        assert weight.shape == (product.n * product.op.stacked, product.k)
    with pytest.raises(KeyError):
        model.use_products(ProductPlan.of(products[:-1], numbered, most_rows=2))
    model.use_products(ProductPlan.of(products, lambda product, rows: None, most_rows=2))


def follow(
    folder: Path, products: tuple[Product, ...], send: list[dict[str, Any]]
) -> tuple[Any, list[tuple[str, int, int]]]:
    """What a peer with these products makes of rank 0's messages, and the progress it saw."""
    seen: list[tuple[str, int, int]] = []
    config = BroadcasterConfig(timeout_s=10)
    result: list[Any] = []

    def peer() -> None:
        with CpuTpBroadcaster.join(
            rank=1, world_size=2, address=folder / "c", config=config
        ) as channel:
            try:
                result.append(
                    tuning._follow(channel, products, 10, lambda *news: seen.append(news))
                )
            except PlanMismatch as error:
                result.append(error)

    thread = threading.Thread(target=peer)
    thread.start()
    with CpuTpBroadcaster.join(rank=0, world_size=2, address=folder / "c", config=config) as root:
        for message in send[:-1]:
            root.publish(message)
        receipt = root.confirm(send[-1])
        thread.join(10)
    result.append(receipt.committed)
    return result, seen


NEWS = {"kind": "progress", "progress": {"stage": "products", "done": 1, "total": 2}}


def test_a_peer_shows_progress_and_takes_the_plan_of_rank_0(tmp_path: Path) -> None:
    plan = ProductPlan.of([HEAD, DOWN], numbered, most_rows=2)
    message = {"kind": "products", "plan": plan.to_message()}
    (taken, committed), seen = follow(tmp_path, (DOWN, HEAD), [NEWS, message])
    assert (taken, committed) == (plan, True)
    assert seen == [("products", 1, 2)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"kind": "products", "plan": []}, "expected .*norm_linear"),
        ({"kind": "products", "plan": 3}, "expected a plan of products"),
        ({"kind": "plan"}, "expected a plan of products, got dict"),
    ],
)
def test_a_peer_refuses_a_plan_that_is_not_for_its_products(
    tmp_path: Path, message: dict[str, Any], reason: str
) -> None:
    (error, committed), _ = follow(tmp_path, (HEAD,), [message])
    assert isinstance(error, PlanMismatch)
    assert not committed
    with pytest.raises(PlanMismatch, match=reason):
        raise error
