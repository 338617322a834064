from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """The command line sets levels and handlers, which later tests in this process would meet."""
    loggers = [logging.getLogger(name) for name in ("tp_runtime", "tp_runtime.broadcast")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """SmolLM2 as a Hugging Face folder in float32, converted once for all test processes."""
    from tp_runtime.models.convert import convert_gguf
    from tp_runtime.models.loading import find_smollm2

    root = tmp_path_factory.getbasetemp()
    # workers of pytest-xdist have a folder each, below one that they share
    shared = root if worker_id == "master" else root.parent
    return convert_gguf(find_smollm2(), shared / "smollm2")
