from __future__ import annotations

import numpy as np
import torch

from tp_runtime.uploads import Uploader


def test_arrays_arrive_as_they_are() -> None:
    uploads = Uploader(torch.device("cpu"))
    integers = np.arange(6, dtype=np.int64).reshape(2, 3)
    small = np.array([7, -1], dtype=np.int32)
    floats = np.array([[0.5, 1.5], [2.5, 3.5]], dtype=np.float32).T
    got = uploads.send(integers, small, floats)
    assert [t.dtype for t in got] == [torch.int64, torch.int32, torch.float32]
    assert [t.tolist() for t in got] == [integers.tolist(), small.tolist(), floats.tolist()]


def test_what_was_sent_may_be_changed_afterwards() -> None:
    array = np.zeros(3, dtype=np.int64)
    (sent,) = Uploader(torch.device("cpu")).send(array)
    array[:] = 9
    assert sent.tolist() == [0, 0, 0]


def test_nothing_to_send() -> None:
    assert Uploader(torch.device("cpu")).send() == ()
