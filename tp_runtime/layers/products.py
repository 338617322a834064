"""Which kernel multiplies which matrix for few rows: decided on one rank, the same on all.

Another kernel rounds in another order, so ranks that choose for themselves could disagree on a
token. Here a choice is a value: rank 0 makes it, every rank is given it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, runtime_checkable

from tp_runtime.errors import PlanFormatError
from tp_runtime.ops.skinny_config import MOST_ROWS, SkinnyConfig, SkinnyOp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tp_runtime.ops.skinny_layer import LayerMatrices

ROWS: Final = (1, 2, 4, 8, 16, 32, MOST_ROWS)
"""A choice is made for each of these; a product with fewer rows takes that of the next."""

Configs = tuple[SkinnyConfig | None, ...]
"""What to run by number of rows; beyond its end, and where it says None, as torch does."""

NO_CONFIGS: Final[Configs] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A kind of product that a model makes: [rows, k] by a weight of n columns; see `SkinnyOp`.

    n, k: of this rank's part; equal on every rank.
    """

    op: SkinnyOp
    n: int
    k: int
    bias: bool = False


@runtime_checkable
class TunedModel(Protocol):
    """A model that lets its products be chosen."""

    @property
    def layer_products(self) -> Mapping[str, Product]:
        """Those of a layer: "qkv", "output", "gate_up" and "down"."""
        ...

    @property
    def other_products(self) -> tuple[Product, ...]: ...

    @property
    def layer_matrices(self) -> Sequence[LayerMatrices]:
        """The matrices of each layer as they lie in memory, to measure with."""
        ...

    def use_products(self, plan: ProductPlan) -> None:
        """Run every product as the plan says from here on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """A choice for each product and each number of `ROWS`."""

    choices: Mapping[Product, Configs]

    @classmethod
    def of(
        cls,
        products: Sequence[Product],
        choose: Callable[[Product, int], SkinnyConfig | None],
        *,
        most_rows: int,
    ) -> Self:
        """Ask `choose(product, rows)` for each number of rows that a batch may need."""
        needed = rows_needed(most_rows)
        return cls(choices={p: tuple(choose(p, rows) for rows in needed) for p in products})

    def configs(self, product: Product) -> Configs:
        """By number of rows, 0 among them. Raises KeyError for a product it does not know."""
        chosen = self.choices[product]
        most = ROWS[len(chosen) - 1] if chosen else 0
        return tuple(chosen[bisect_left(ROWS, rows)] for rows in range(most + 1))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the choices."""
        text = json.dumps(self.to_message(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_message(self) -> list[dict[str, Any]]:
        """For JSON or MessagePack."""
        return [
            {
                "op": product.op.value,
                "n": product.n,
                "k": product.k,
                "bias": product.bias,
                "configs": [None if c is None else c.to_dict() for c in configs],
            }
            for product, configs in self.choices.items()
        ]

    @classmethod
    def from_message(cls, message: object) -> Self:
        """The inverse of `to_message`. Raises PlanFormatError."""
        try:
            choices = {}
            for entry in message:  # type: ignore[attr-defined]
                product = Product(
                    op=SkinnyOp(entry["op"]), n=entry["n"], k=entry["k"], bias=entry["bias"]
                )
                choices[product] = tuple(
                    None if c is None else SkinnyConfig.from_dict(c) for c in entry["configs"]
                )
        except (TypeError, KeyError, ValueError) as error:
            raise PlanFormatError(f"expected a plan of products, got {error!r}") from error
        return cls(choices=choices)


def rows_needed(most_rows: int) -> tuple[int, ...]:
    """Those of `ROWS` that batches of up to `most_rows` take."""
    return ROWS[: bisect_left(ROWS, min(most_rows, MOST_ROWS)) + 1]


def config_for(configs: Configs, rows: int) -> SkinnyConfig | None:
    """What a layer with these configurations runs for so many rows."""
    return configs[rows] if rows < len(configs) else None
