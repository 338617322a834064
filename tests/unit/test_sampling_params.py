from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tp_runtime.errors import RequestError
from tp_runtime.sampling import SamplingParams


def test_defaults_are_greedy_and_filter_nothing() -> None:
    params = SamplingParams()
    assert params.greedy
    assert not params.filters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e5),
        ("temperature", "1"),
        ("temperature", False),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", "end"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", 3),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 1e4),
        ("top_p", 1),
        ("min_p", 1.0),
        ("seed", 0),
        ("seed", 2**63 - 1),
    ],
)
def test_the_edges_of_a_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_filters_only_count_when_something_is_drawn() -> None:
    assert not SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1).filters
    assert SamplingParams(temperature=0.5, top_k=5).filters
    assert SamplingParams(temperature=0.5, top_p=0.5).filters
    assert SamplingParams(temperature=0.5, min_p=0.5).filters
    assert not SamplingParams(temperature=0.5).filters


def test_stop_is_kept_as_a_tuple_and_nothing_can_be_changed_later() -> None:
    params = SamplingParams(stop=["a", "b"])  # type: ignore[arg-type]
    assert params.stop == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
