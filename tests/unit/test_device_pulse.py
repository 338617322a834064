"""What a rank tells of a device that it asks now and then."""

from __future__ import annotations

import threading
import time

from tp_runtime.device_pulse import NEWS_BEATS, DevicePulse

BEAT_S = 0.005


class Device:
    def __init__(self) -> None:
        self.fault: str | None = None
        self.gave_up = False
        self.asked = 0
        self.told: list[str] = []
        self.done = threading.Event()
        self.pulse = DevicePulse(
            self.probe, gave_up=lambda: self.gave_up, tell=self.tell, beat_s=BEAT_S
        )

    def probe(self) -> str | None:
        self.asked += 1
        return self.fault

    def tell(self, what: str) -> None:
        self.told.append(what)
        self.done.set()

    def await_beats(self, count: int) -> None:
        end, deadline = self.asked + count, time.monotonic() + 30
        while self.asked < end:
            assert time.monotonic() < deadline
            time.sleep(BEAT_S)


def test_a_fault_is_told_once() -> None:
    device = Device()
    device.await_beats(3)
    assert not device.told
    device.fault = "CUDA error 700: an illegal memory access was encountered"
    assert device.done.wait(30)
    device.pulse.close()
    assert device.told == [f"its device failed: {device.fault}"]


def test_a_sum_without_its_peer_is_told_after_the_channel_had_time() -> None:
    device = Device()
    device.gave_up = True
    assert device.done.wait(30)
    assert device.asked >= NEWS_BEATS
    device.pulse.close()
    assert len(device.told) == 1
    assert "without its peers" in device.told[0]


def test_nothing_is_asked_after_the_end() -> None:
    device = Device()
    device.await_beats(1)
    device.pulse.close()
    device.pulse.close()
    asked, device.fault = device.asked, "CUDA error"
    time.sleep(4 * BEAT_S)
    assert (device.asked, device.told) == (asked, [])
