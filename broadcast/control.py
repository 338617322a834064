"""The control connection: numbered frames with a small dict, sent by any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from tp_runtime.broadcast.codec import decode, encode
from tp_runtime.broadcast.sockets import PacketSocket, close_all
from tp_runtime.broadcast.wire import HEADER_BYTES, Kind, pack_frame, parse_frame
from tp_runtime.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Texts written by people or programs (reasons, details) in one control frame, bytes.
MAX_TEXT_BYTES = 128 << 10


class ControlFrame(NamedTuple):
    kind: Kind
    body: dict[str, Any]
    descriptors: list[int]


class ControlPort:
    """One side of a control connection.

    Args:
        epoch: restart count, written to every frame. Checked on arrival unless `check_epoch`
            is False, which a handshake uses to answer a wrong epoch by name.
    """

    __slots__ = ("_checksum", "_epoch", "_lock", "_received", "_sent", "check_epoch", "packets")

    def __init__(
        self, packets: PacketSocket, *, epoch: int, checksum: bool, check_epoch: bool = True
    ) -> None:
        self.packets = packets
        self.check_epoch = check_epoch
        self._epoch = epoch
        self._checksum = checksum
        # reentrant: a signal handler may abort while its thread is sending
        self._lock = threading.RLock()
        self._sent = 0
        self._received = 0

    def fileno(self) -> int:
        return self.packets.fileno()

    def send(
        self, kind: Kind, body: dict[str, Any] | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        """Send a frame whole. Thread-safe.

        Raises:
            BlockingIOError: the buffer is full; nothing was sent.
            OSError: the other side is gone.
        """
        encoded = b"" if body is None else encode(body)
        with self._lock:
            frame = pack_frame(
                kind,
                encoded,
                sequence=self._sent + 1,
                epoch=self._epoch,
                checksum=self._checksum,
            )
            self.packets.send(frame, descriptors)
            self._sent += 1

    def try_send(self, kind: Kind, body: dict[str, Any] | None = None) -> bool:
        """Send if it can be done now; False if the buffer is full or the other side is gone."""
        try:
            self.send(kind, body)
        except OSError:
            return False
        return True

    def receive(self) -> ControlFrame:
        """Take the next frame.

        Raises:
            BlockingIOError: nothing is there.
            EOFError: the other side left.
            OSError: the connection is broken.
            ProtocolError: the bytes are not a control frame.
        """
        packet, descriptors = self.packets.receive_with_descriptors()
        if not packet:
            raise EOFError("connection closed")
        try:
            header, view = parse_frame(
                packet,
                sequence=self._received + 1,
                epoch=self._epoch if self.check_epoch else None,
            )
            if header.kind < Kind.HELLO or header.outside:
                raise ProtocolError(f"{header.kind.name} frame on the control socket")
            body = decode(view) if len(packet) > HEADER_BYTES and view else {}
            if type(body) is not dict:
                raise ProtocolError(f"{header.kind.name}: body is a {type(body).__name__}, no dict")
        except ProtocolError:
            close_all(descriptors)
            raise
        self._received += 1
        return ControlFrame(header.kind, body, descriptors)

    def close(self) -> None:
        self.packets.close()


def clip(text: str) -> str:
    """Cut a text so that it surely fits a control frame."""
    data = text.encode("utf-8", "replace")
    return data[:4000].decode("utf-8", "ignore")
