"""What a rank holds of another one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp_runtime.broadcast.control import ControlPort
    from tp_runtime.broadcast.sockets import PacketSocket


@dataclass(slots=True, kw_only=True)
class Link:
    """The two connections to another rank, and its process.

    Args:
        pidfd: readable when the process has exited; -1 where the system has none.
        left: the rank said good-bye, so its end is no loss.
    """

    rank: int
    pid: int
    pidfd: int
    data: PacketSocket
    control: ControlPort
    left: bool = False

    def shutdown(self) -> None:
        self.data.shutdown()
        self.control.packets.shutdown()

    def close(self) -> None:
        self.data.close()
        self.control.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass(slots=True, kw_only=True)
class Sibling:
    """Another peer: no connection, only its process."""

    rank: int
    pid: int
    pidfd: int
    left: bool = False

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
