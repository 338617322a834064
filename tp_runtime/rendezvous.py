"""Where the ranks of one tensor-parallel group meet: a socket path that only they compute.

A path in a directory of mode 0700 is used rather than an abstract name, because abstract names
have no permissions. The name is a hash of what tells runs apart, so that two runs, two groups
of one run, or two attempts of one group never meet, and so that it fits into ``sun_path``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError, TpGroupError

if TYPE_CHECKING:
    from tp_runtime.ranks import RankInfo

__all__ = ["MAX_ADDRESS_BYTES", "channel_address", "runtime_directory"]

log = logging.getLogger(__name__)

MAX_ADDRESS_BYTES = 99
"""``sun_path`` holds 108 bytes; the rest is room for a suffix."""

_NAME_BYTES = len("/") + 20 + len(".sock")


def channel_address(info: RankInfo) -> Path:
    """The path of the channel of this rank's tensor-parallel group; its folder exists.

    Args:
        info: the place of this rank; every rank of a group computes the same path.

    Raises:
        TpGroupError: the directory belongs to someone else, or others may write in it.
        ConfigError: the path would not fit into a Unix socket address.
    """
    identity = (
        info.run_id,
        info.master_addr,
        str(info.master_port),
        str(info.restart_count),
        str(info.tp_group),
        str(info.tp_size),
        str(os.getuid()),
        # A single rank has no store port that tells it from another single run.
        str(os.getpid()) if info.world_size == 1 else "",
    )
    digest = hashlib.blake2b("\0".join(identity).encode(), digest_size=10).hexdigest()
    address = runtime_directory() / f"{digest}.sock"
    length = len(os.fsencode(address))
    if length > MAX_ADDRESS_BYTES:
        raise ConfigError(
            f"{address} has {length} bytes, a socket path may have {MAX_ADDRESS_BYTES}: "
            f"set XDG_RUNTIME_DIR to a shorter directory"
        )
    return address


def runtime_directory() -> Path:
    """The private directory for sockets of this user, made if it is not there.

    ``$XDG_RUNTIME_DIR/tp_runtime`` where that variable names a directory of this user,
    otherwise ``/tmp/tp_runtime-<uid>``. Every rank of a host comes to the same answer.

    Raises:
        TpGroupError: it is a link, belongs to another user, or is open to others.
    """
    path = _base_directory()
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise TpGroupError(
            f"cannot make {path}: {error.strerror}; set XDG_RUNTIME_DIR to a directory of yours"
        ) from error
    _require_private(path)
    return path


def _base_directory() -> Path:
    uid = os.getuid()
    fallback = Path(f"/tmp/tp_runtime-{uid}")
    named = os.environ.get("XDG_RUNTIME_DIR")
    if not named:
        return fallback
    base = Path(named)
    try:
        found = base.stat()
    except OSError as error:
        # su and containers keep the variable of a session that is not there.
        log.info("XDG_RUNTIME_DIR=%s: %s; using %s", named, error.strerror, fallback)
        return fallback
    if not base.is_absolute() or not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        log.info("XDG_RUNTIME_DIR=%s is not a directory of uid %d; using %s", named, uid, fallback)
        return fallback
    path = base / "tp_runtime"
    length = len(os.fsencode(path)) + _NAME_BYTES
    if length > MAX_ADDRESS_BYTES:
        log.info("XDG_RUNTIME_DIR=%s is too long for a socket path; using %s", named, fallback)
        return fallback
    return path


def _require_private(path: Path) -> None:
    found = path.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != os.getuid():
        problem = f"belongs to uid {found.st_uid}, expected {os.getuid()}"
    elif mode & 0o077:
        problem = f"has mode {mode:04o}, expected 0700"
    else:
        return
    raise TpGroupError(
        f"{path} {problem}: sockets are only put where no other user can reach them; "
        f"remove it, or set XDG_RUNTIME_DIR to a private directory"
    )
