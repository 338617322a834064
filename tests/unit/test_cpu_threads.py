"""CPU threads are shared out among the ranks of a host."""

from __future__ import annotations

import os

import pytest

from tp_runtime.broadcast.cores import cores_available
from tp_runtime.cpu_threads import cpu_threads_per_rank, requested_threads
from tp_runtime.errors import EnvError


def test_the_ranks_share_the_cpus_of_the_affinity() -> None:
    cpus = cores_available()
    assert 1 <= cpus <= len(os.sched_getaffinity(0))
    assert cpu_threads_per_rank(1) == cpus
    assert cpu_threads_per_rank(cpus) == 1
    assert cpu_threads_per_rank(cpus + 1) == 1


@pytest.mark.parametrize(
    ("env", "ranks", "expected"),
    [
        ({}, 2, None),
        ({"OMP_NUM_THREADS": "1"}, 2, None),  # set by torchrun, not by a person
        ({"OMP_NUM_THREADS": "1"}, 1, 1),
        ({"OMP_NUM_THREADS": "3,2"}, 2, 3),
        ({"OMP_NUM_THREADS": "4", "TP_RUNTIME_NUM_THREADS": "1"}, 2, 1),
    ],
)
def test_what_the_user_asked_for(env: dict[str, str], ranks: int, expected: int | None) -> None:
    assert requested_threads(env, local_world_size=ranks) == expected


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_malformed_number_names_its_variable(value: str) -> None:
    with pytest.raises(EnvError, match=rf"TP_RUNTIME_NUM_THREADS='{value}'"):
        requested_threads({"TP_RUNTIME_NUM_THREADS": value})
