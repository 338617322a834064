from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """SmolLM2 as a Hugging Face folder in float32, converted once for all test processes."""
    from tp_runtime.models.convert import convert_to_folder

    root = tmp_path_factory.getbasetemp()
    # workers of pytest-xdist have a folder each below one that they share
    shared = root if worker_id == "master" else root.parent
    folder = shared / "smollm2"
    with open(shared / "smollm2.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = shared / "smollm2.partial"
            partial.mkdir()
            convert_to_folder("smollm2", partial)
            partial.rename(folder)
    return folder
