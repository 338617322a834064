"""Asks the device of a rank now and then whether it still works, and tells the other ranks.

A fault of a kernel shows in the next call of the driver. A rank that waits for rank 0 makes none,
while rank 0 waits for its sums; so a thread asks, which does nothing else, as the driver may block
it for as long as another thread is inside.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import torch

from tp_runtime.cuda_driver import CudaDriver
from tp_runtime.errors import TpGroupError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DevicePulse", "device_probe"]

log = logging.getLogger(__name__)

PULSE_S = 0.25
NEWS_BEATS = 4
"""A sum without its peer is told after so many beats: the channel may know who is lost, and why."""
_CLOSE_S = 1.0


class DevicePulse:
    """A daemon thread that ends with the first thing that it tells.

    Args:
        probe: what is wrong with the device; None while it works.
        gave_up: whether a sum of the device has ended without its peer.
        tell: called once, on the thread, with what is wrong.
        beat_s: between two looks.
    """

    def __init__(
        self,
        probe: Callable[[], str | None],
        *,
        gave_up: Callable[[], bool],
        tell: Callable[[str], None],
        beat_s: float = PULSE_S,
    ) -> None:
        self._probe = probe
        self._gave_up = gave_up
        self._tell = tell
        self._beat_s = beat_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tp-device-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking; idempotent. A thread that the driver holds is left behind."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                log.info("%s is still inside the driver; left behind", self._thread.name)

    def _run(self) -> None:
        without_peer = 0
        while not self._stopped.wait(self._beat_s):
            fault = self._probe()
            if fault is not None:
                self._tell(f"its device failed: {fault}")
                return
            without_peer = without_peer + 1 if self._gave_up() else 0
            if without_peer >= NEWS_BEATS:
                self._tell("a sum on its device ended without its peers")
                return


def device_probe(device: torch.device) -> Callable[[], str | None]:
    """For `DevicePulse`; to be made on a thread on which the device is current."""
    driver = CudaDriver()
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        context = driver.context()

    def probe() -> str | None:
        try:
            return driver.fault(context, event.cuda_event)
        except TpGroupError as error:
            return str(error)

    return probe
