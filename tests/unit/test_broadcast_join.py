"""The handshake: who is admitted, who is refused by which field, what is left behind.

Every rank is a thread here, so a process has both ends; the rank tests use real processes.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tp_runtime.broadcast import (
    BroadcasterConfig,
    ChannelClosed,
    CpuTpBroadcaster,
    DeadlineExceeded,
    HandshakeRefused,
    PeerLost,
    ProtocolError,
)
from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.handshake import Identity
from tp_runtime.broadcast.wire import Kind, pack_frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = BroadcasterConfig(
    join_timeout_s=20, timeout_s=10, run_id="run-7", epoch=2, group="g0", token="secret"
)
BRIEF = replace(CONFIG, join_timeout_s=0.3)


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def join(
    rank: int, size: int, address: Path, config: BroadcasterConfig = CONFIG
) -> CpuTpBroadcaster:
    return CpuTpBroadcaster.join(rank=rank, world_size=size, address=address, config=config)


def listening(address: Path) -> None:
    """Wait until rank 0 listens."""
    limit_s = time.monotonic() + 10
    while True:
        # the file is there a moment before anybody listens
        try:
            raw_connection(address).close()
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < limit_s
            time.sleep(0.002)
        else:
            return


def finish(*joins: Future[CpuTpBroadcaster]) -> None:
    for channel in [future.result(timeout=20) for future in joins]:
        channel.close()


def raw_connection(address: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    folder = os.open(address.parent, os.O_PATH)
    try:
        # the name of a socket may have 107 bytes, the folder of a test more
        sock.connect(f"/proc/self/fd/{folder}/{address.name}")
    except OSError:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("run_id", {"run_id": "run-8"}),
        ("epoch", {"epoch": 1}),
        ("group", {"group": "g1"}),
        ("token", {"token": "guess"}),
        ("max_message_bytes", {"max_message_bytes": 1000}),
    ],
)
def test_a_wrong_field_is_named_and_the_join_goes_on(
    address: Path, threads: ThreadPoolExecutor, field: str, change: dict[str, object]
) -> None:
    root = threads.submit(join, 0, 2, address)
    with pytest.raises(HandshakeRefused, match=f"field {field}: ") as caught:
        join(1, 2, address, replace(CONFIG, **change))  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
    assert "guess" not in str(caught.value)
    finish(root, threads.submit(join, 1, 2, address))


def test_world_size_out_of_range_and_duplicate_ranks_are_refused_while_the_join_goes_on(
    address: Path, threads: ThreadPoolExecutor
) -> None:
    root = threads.submit(join, 0, 3, address)
    with pytest.raises(HandshakeRefused, match="field world_size: expected 3, rank 1 has 4"):
        join(1, 4, address)
    first = threads.submit(join, 1, 3, address)
    with raw_connection(address) as stranger:
        body = Identity.of(CONFIG, rank=9, world_size=3).body()
        stranger.send(pack_frame(Kind.HELLO, encode(body), sequence=1, epoch=2))
        assert b"field rank: expected 1 to 2, got 9" in stranger.recv(4096)
    # whichever of the two comes first is rank 1, the other is refused
    second = threads.submit(join, 1, 3, address)
    refused = None
    limit_s = time.monotonic() + 10
    while refused is None:
        assert time.monotonic() < limit_s
        refused = next((f for f in (first, second) if f.done()), None)
        time.sleep(0.002)
    with pytest.raises(HandshakeRefused, match="field rank: rank 1 has joined already"):
        refused.result()
    other = second if refused is first else first
    finish(root, other, threads.submit(join, 2, 3, address))


def test_the_peer_checks_rank_0_too(address: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(address))
        listener.listen(1)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                body = Identity.of(replace(CONFIG, group="g5"), rank=1, world_size=2).body()
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with ours, theirs:
                    frame = pack_frame(Kind.WELCOME, encode(body), sequence=1, epoch=2)
                    socket.send_fds(connection, [frame], [theirs.fileno()])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeRefused, match="refuses rank 0: field group: expected 'g0'"):
            join(1, 2, address)
        thread.join()


def test_another_protocol_version_garbage_and_silence_do_not_disturb_the_join(
    address: Path, threads: ThreadPoolExecutor
) -> None:
    root = threads.submit(join, 0, 2, address)
    listening(address)
    with raw_connection(address), raw_connection(address) as old, raw_connection(address) as noise:
        raw_connection(address).close()
        hello = bytearray(pack_frame(Kind.HELLO, encode({}), sequence=1, epoch=2))
        hello[2] = 9
        old.send(hello)
        assert b"protocol version: expected 1, got 9" in old.recv(4096)
        noise.send(os.urandom(64))
        assert b"magic" in noise.recv(4096)
        finish(root, threads.submit(join, 1, 2, address))


def test_more_strangers_than_are_kept_waiting(address: Path, threads: ThreadPoolExecutor) -> None:
    root = threads.submit(join, 0, 2, address)
    listening(address)
    strangers: list[socket.socket] = []
    limit_s = time.monotonic() + 10
    while len(strangers) < 80:
        assert time.monotonic() < limit_s
        try:
            strangers.append(raw_connection(address))
        except BlockingIOError:
            time.sleep(0.001)
    finish(root, threads.submit(join, 1, 2, address))
    for stranger in strangers:
        stranger.close()


def test_nothing_is_left_and_nothing_leaks(address: Path, threads: ThreadPoolExecutor) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    running = threading.active_count()
    for _ in range(20):
        joins = [threads.submit(join, rank, 3, address) for rank in range(3)]
        channels = [future.result(timeout=20) for future in joins]
        assert os.listdir(address.parent) == []
        assert all(channel.pids == (os.getpid(),) * 3 for channel in channels)
        for channel in channels:
            channel.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() <= running + 3  # the pool's own


def test_the_file_is_private_and_reachable_under_a_long_folder(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    address = folder / "channel"
    root = threads.submit(join, 0, 2, address)
    listening(address)
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    finish(root, threads.submit(join, 1, 2, address))
    assert os.listdir(folder) == []


def test_the_file_of_a_dead_run_is_replaced(address: Path, threads: ThreadPoolExecutor) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(os.fspath(address))
        dead.listen(1)
    assert address.exists()
    finish(threads.submit(join, 1, 2, address), threads.submit(join, 0, 2, address))
    assert not address.exists()


def test_a_live_run_and_other_files_are_never_removed(address: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as live:
        live.bind(os.fspath(address))
        live.listen(1)
        with pytest.raises(HandshakeRefused, match="another run listens there"):
            join(0, 2, address, BRIEF)
        assert address.is_socket()
    address.unlink()
    address.write_text("precious")
    with pytest.raises(HandshakeRefused, match="another kind of file"):
        join(0, 2, address, BRIEF)
    assert address.read_text() == "precious"


def test_who_did_not_come_is_named(address: Path, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(join, 1, 3, address)
    with pytest.raises(DeadlineExceeded, match=r"ranks \[2\] did not join") as caught:
        join(0, 3, address, BRIEF)
    assert caught.value.rank == 2
    with pytest.raises(PeerLost, match="given up because of rank 2"):
        first.result(timeout=20)
    assert os.listdir(address.parent) == []


def test_nobody_listens(address: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="rank 0 did not listen") as caught:
        join(1, 2, address, BRIEF)
    assert caught.value.rank == 0


def test_a_rank_that_gives_up_while_joining_ends_the_join(
    address: Path, threads: ThreadPoolExecutor
) -> None:
    root = threads.submit(join, 0, 3, address)
    with pytest.raises(DeadlineExceeded, match="did not complete the group"):
        join(1, 3, address, BRIEF)
    with pytest.raises(
        PeerLost, match=r"rank 1 .* died or gave up .* ranks \[2\] had not"
    ) as caught:
        root.result(timeout=20)
    assert caught.value.rank == 1


def test_garbage_on_an_open_channel_ends_it_on_every_rank(
    address: Path, threads: ThreadPoolExecutor
) -> None:
    joins = [threads.submit(join, rank, 3, address) for rank in range(3)]
    root, first, second = (future.result(timeout=20) for future in joins)
    with root, first, second:
        first._root.control.packets.send(b"x" * 40)  # type: ignore[attr-defined]
        limit_s = time.monotonic() + 10
        while root.failure is None or second.failure is None:
            assert time.monotonic() < limit_s
            time.sleep(0.002)
        assert isinstance(root.failure, ProtocolError)
        assert "rank 1" in str(root.failure)
        assert isinstance(second.failure, PeerLost)
        assert second.failure.rank == 1


def test_close_from_another_thread_ends_a_waiting_receive(
    address: Path, threads: ThreadPoolExecutor
) -> None:
    channels: list[CpuTpBroadcaster] = []
    waiting = threading.Event()

    def peer() -> None:
        channels.append(join(1, 2, address))
        waiting.set()
        channels[0].receive()

    receiving = threads.submit(peer)
    root = threads.submit(join, 0, 2, address).result(timeout=20)
    assert waiting.wait(20)
    channels[0].close()
    with pytest.raises(ChannelClosed):
        receiving.result(timeout=20)
    root.close()


def test_a_folder_that_another_start_holds_is_an_error_in_time(address: Path) -> None:
    folder = os.open(address.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(DeadlineExceeded, match="was locked by another process for 0"):
        join(0, 2, address, BRIEF)
    os.close(folder)
