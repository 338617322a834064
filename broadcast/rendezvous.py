"""Where the ranks of a run meet: a socket file that exists only while they join."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError, DeadlineExceeded, HandshakeRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tp_runtime.broadcast.deadline import Deadline

log = logging.getLogger(__name__)

# sockaddr_un holds 108 bytes with the final zero.
_MAX_ADDRESS_BYTES = 107
_RETRY_S = (0.001, 0.02)
_LOCK_POLL_S = 0.005
_UNLINK_S = 1.0


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Address:
    """A socket file, reachable however long the path of its folder is.

    Args:
        path: the file; its folder must exist.

    Raises:
        ConfigError: the folder does not exist, or the file name alone is too long.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"address {self.path}: its folder cannot be opened ({error.strerror}); create it"
            ) from None
        # The short form goes through the open folder, so the path may have any length.
        short = f"/proc/self/fd/{self._folder}/{self.path.name}"
        full = os.fspath(self.path)
        self.name = full if len(os.fsencode(full)) <= _MAX_ADDRESS_BYTES else short
        if len(os.fsencode(self.name)) > _MAX_ADDRESS_BYTES:
            os.close(self._folder)
            raise ConfigError(
                f"address {self.path}: a file name of {len(os.fsencode(self.path.name))} bytes "
                "is too long for a Unix socket; use at most 80"
            )

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock of the folder: of several ranks 0, one at a time looks and binds.

        Raises:
            DeadlineExceeded: another process, which may be stopped, held it for too long.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the folder {self.path.parent} was locked by another process for "
                        f"{timeout_s:g} s: does a start there hang? (fuser names it)"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(self._folder, fcntl.LOCK_UN)

    def stat(self) -> os.stat_result | None:
        """Of the file itself, links not followed; None if there is none."""
        try:
            return os.stat(self.path.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path.name, dir_fd=self._folder)

    def close(self) -> None:
        os.close(self._folder)


class Listener:
    """Rank 0's end of the rendezvous. `close` removes the file, if it is still this one's.

    Args:
        backlog: connections that may wait to be accepted.
        timeout_s: how long another start in the same folder is waited for.

    Raises:
        DeadlineExceeded: another start did not end in time.
        HandshakeRefused: another run listens at this address, or the file is no socket of ours.
    """

    def __init__(self, path: str | Path, *, backlog: int, timeout_s: float) -> None:
        self._address = Address(path)
        self.sock = _new_socket()
        try:
            with self._address.locked(timeout_s):
                self._remove_stale()
                # Linux gives the file the mode of the socket, so it never is open to others.
                os.fchmod(self.sock.fileno(), 0o600)
                self.sock.bind(self._address.name)
                self.sock.listen(backlog)
                bound = self._address.stat()
        except BaseException:
            self.sock.close()
            self._address.close()
            raise
        self._inode = None if bound is None else (bound.st_dev, bound.st_ino)
        self.sock.setblocking(False)

    def _remove_stale(self) -> None:
        """Remove the file of a dead run. Only a refused connection proves that nobody listens."""
        path = self._address.path
        found = self._address.stat()
        if found is None:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise HandshakeRefused(
                f"address {path}: expected no file or a socket, found another kind of file; "
                "choose another address or remove it"
            )
        if found.st_uid != os.geteuid():
            raise HandshakeRefused(
                f"address {path}: the socket file belongs to uid {found.st_uid}, "
                f"this process is uid {os.geteuid()}; choose another address"
            )
        with _new_socket() as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._address.name)
            except ConnectionRefusedError:
                log.info("removing the socket file of a dead run: %s", path)
                self._address.unlink()
                return
            except BlockingIOError:
                # its backlog is full, so somebody listens
                pass
        raise HandshakeRefused(
            f"address {path}: another run listens there; "
            "give every run its own address (run id, master port, restart count, group)"
        )

    def close(self) -> None:
        self.sock.close()
        try:
            with self._address.locked(_UNLINK_S):
                found = self._address.stat()
                if found is not None and (found.st_dev, found.st_ino) == self._inode:
                    self._address.unlink()
        except DeadlineExceeded as error:  # whoever binds there next removes the file
            log.warning("the socket file %s is left behind: %s", self._address.path, error)
        self._address.close()


def connect(path: str | Path, *, rank: int, deadline: Deadline) -> socket.socket:
    """A peer's end: connect as soon as rank 0 listens.

    Raises:
        DeadlineExceeded: nobody listened in time.
        HandshakeRefused: the file is there but may not be used.
    """
    address = Address(path)
    pause_s, longest_s = _RETRY_S
    try:
        while True:
            sock = _new_socket()
            try:
                sock.setblocking(False)
                sock.connect(address.name)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
                sock.close()
                why = error.strerror
            except OSError as error:
                sock.close()
                raise HandshakeRefused(
                    f"address {address.path}: rank {rank} cannot connect: {error.strerror}"
                ) from None
            else:
                return sock
            if deadline.expired():
                raise DeadlineExceeded(
                    f"rank {rank}: rank 0 did not listen at {address.path} within "
                    f"{deadline.timeout_s:g} s ({why}); is rank 0 running with this address, "
                    "and is the group not complete already?",
                    rank=0,
                )
            asked_s = min(pause_s, deadline.remaining_s())
            started_s = time.monotonic()
            time.sleep(asked_s)
            deadline.woke(slept_from_s=started_s, asked_s=asked_s)
            pause_s = min(pause_s * 2, longest_s)
    finally:
        address.close()
