"""Which processes have ended, as a group sees it."""

from __future__ import annotations

import subprocess
import sys

from tp_runtime.liveness import PeerWatch


def test_every_peer_that_has_ended_is_told_in_its_turn() -> None:
    wait = [sys.executable, "-c", "input()"]
    peers = [subprocess.Popen(wait, stdin=subprocess.PIPE) for _ in range(2)]
    watch = PeerWatch([0, *(peer.pid for peer in peers)], rank=0)
    assert watch.dead() is None
    for rank in (2, 1):
        peers[rank - 1].communicate(b"\n", timeout=30)
        assert watch.dead() == 2
        assert watch.all_dead() == [2, 1][: 3 - rank]
    watch.close()
    watch.close()
    assert watch.all_dead() == [2, 1]
