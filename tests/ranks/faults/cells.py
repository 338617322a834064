"""The cells of the fault matrix, and what every cell must lead to.

A cell is a fault, the phase of the channel in which it strikes, the side of the faulty rank
(rank 0, or one of the peers) and the number of ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

TIMEOUT_S = 0.3
# Longer than any wait may be silent, where a fault must outlast that.
LONG_S = TIMEOUT_S + 0.05
# Restart count of the group.
EPOCH = 3
# For a rank that is to wait in vain in a join; the others are given time.
BRIEF_JOIN_S = 0.3
JOIN_S = 5.0
# On top of its deadline every survivor has this long to raise.
GRACE_S = 0.5
SIZES = (2, 3, 8)
SIDES = ("root", "peer")
PHASES = ("joining", "idle", "in_publish", "in_receive", "in_confirm", "in_close")
# Those after which the group must go on as if nothing had happened.
HARMLESS = ("slow", "exec", "fork", "eintr", "jump")
FAULTS = (
    "kill",  # kill -9
    "kill_parent",  # kill -9 of a rank whose child lives on and holds the same connections
    "stop",  # SIGSTOP
    "closed_data",  # the data connection is shut down, the process lives
    "closed_control",  # the control connection is shut down, the process lives
    "garbage",  # random bytes
    "version",  # frames of another protocol version
    "epoch",  # frames of another restart of the run
    "uid",  # a process of another user
    "full",  # a living rank takes nothing, until buffers are full
    "slow",  # a rank does nothing for a while that is shorter than the deadline
    "exec",  # a program is started that inherits what it can and lives on
    "fork",  # a forked child touches the channel and lives on
    "eintr",  # thousands of signals a second
    "jump",  # the clock of the host jumps by 10 s
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    fault: str
    phase: str
    side: str
    size: int

    @property
    def id(self) -> str:
        return f"{self.fault}-{self.phase}-{self.side}-{self.size}"

    @property
    def victim(self) -> int:
        """The rank that the fault strikes."""
        return 0 if self.side == "root" else max(1, self.size // 2)

    @property
    def harmless(self) -> bool:
        return self.fault in HARMLESS

    @property
    def last(self) -> int:
        """The rank that joins last where the group must be incomplete when the fault strikes."""
        return self.size - 1

    @property
    def leaves(self) -> bool:
        """A peer that closes is missed when it is needed, whatever else happens to it."""
        return self.phase == "in_close" and self.side == "peer" and self.fault != "full"

    @property
    def goes_on(self) -> bool:
        """The group ends well; the faulty rank is then held to the same as the others."""
        return (self.harmless and not self.leaves) or (
            self.phase == "joining"
            and self.side == "peer"
            and (self.fault in ("version", "epoch", "uid") or self._noise_before_hello)
        )

    @property
    def _noise_before_hello(self) -> bool:
        return self.fault == "garbage" and self.size == 2

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.size) if self.goes_on or rank != self.victim]

    @property
    def stale_file(self) -> bool:
        """Rank 0 was killed while it listened: nobody can remove the file but the next run."""
        return (
            self.phase == "joining"
            and self.side == "root"
            and self.fault in ("kill", "kill_parent")
        )

    def join_s(self, rank: int) -> float:
        if self.phase == "joining" and any(
            kind == "DeadlineExceeded" for kind, _ in self._join_errors(rank)
        ):
            return BRIEF_JOIN_S
        return JOIN_S

    def _join_errors(self, rank: int) -> set[Outcome]:
        if self.side == "peer" and (self.fault == "stop" and self.size > 2):
            return set()  # the group forms, the deadline is that of a publish
        if rank == self.victim:
            # its own end is not looked at, but it must come
            return {("DeadlineExceeded", None)} if self.fault in ("epoch", "uid", "stop") else set()
        return set(expected(self, rank).outcomes)


Outcome = tuple[str, int | None]
WELL: Outcome = ("ok", None)
CLOSED: Outcome = ("ChannelClosed", None)
GARBAGE: Outcome = ("ProtocolError", None)
REFUSED: Outcome = ("HandshakeRefused", None)


def lost(rank: int) -> Outcome:
    return ("PeerLost", rank)


def late(rank: int) -> Outcome:
    return ("DeadlineExceeded", rank)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a survivor must report.

    Args:
        outcomes: class of the exception and the rank that it names; any of these.
        words: each must be in the message.
        noticed: the channel shows its failure before any call is made.
        acted: `acknowledge` may have returned True.
    """

    outcomes: frozenset[Outcome]
    words: tuple[str, ...] = ()
    noticed: bool = False
    acted: bool = True


# A field of the header that the message names.
_WORDS = {
    "garbage": "magic",
    "version": "protocol version",
    "epoch": "epoch",
    "uid": "uid",
}
_WRITES = ("garbage", "version", "epoch")


def expected(cell: Cell, rank: int) -> Expected:
    """What this survivor of a cell must report."""
    if cell.goes_on:
        return _ends_well(rank)
    if cell.phase == "joining":
        return _expected_in_join(cell, rank)
    if cell.side == "root":
        return _expected_of_peers(cell)
    return _expected_of_others(cell, rank)


def _ends_well(rank: int) -> Expected:
    return Expected(outcomes=frozenset({CLOSED if rank else WELL}))


def _one(*outcomes: Outcome, words: tuple[str, ...] = (), noticed: bool = False) -> Expected:
    return Expected(outcomes=frozenset(outcomes), words=words, noticed=noticed, acted=False)


def _expected_in_join(cell: Cell, rank: int) -> Expected:
    fault, victim = cell.fault, cell.victim
    if cell.side == "root":
        if fault in ("garbage", "version", "epoch", "uid"):
            return _one(REFUSED, words=(_WORDS[fault],))
        if fault in ("stop", "kill_parent"):
            return _one(late(0))
        if fault == "kill" and cell.size > 2 and rank == cell.last:
            return _one(late(0), words=("did not listen",))
        return _one(lost(0))
    if fault in ("kill_parent", "closed_data"):
        return _one(lost(victim))
    if cell.size == 2:
        return _one(late(victim), words=("did not join",))
    if fault == "stop":
        return _one(late(victim) if rank == 0 else lost(victim))
    if rank == cell.last:
        return _one(late(0), words=("did not listen",))
    return _one(lost(victim))


def _expected_of_peers(cell: Cell) -> Expected:
    """Rank 0 is the faulty one."""
    fault = cell.fault
    in_close = {CLOSED} if cell.phase == "in_close" else set()  # it may have been told by then
    noticed = cell.phase == "idle" and fault not in ("stop", "closed_data")
    words: tuple[str, ...] = ()
    if fault in ("stop", "full"):
        outcomes = {late(0)}
    elif fault in _WRITES:
        # one who was told of the close only says that, and its message needs no such word
        words = () if in_close else ("rank 0 sent", _WORDS[fault])
        outcomes = {GARBAGE}
    else:
        outcomes = {lost(0)}
        if fault == "closed_control" and in_close:
            # told by then that the end is near, and the test freezes rank 0 before that comes
            outcomes.add(late(0))
    # rank 0 of the row "full" decides as it is asked, it only does not listen
    acted = fault == "full"
    return Expected(
        outcomes=frozenset(outcomes | in_close), words=words, noticed=noticed, acted=acted
    )


def _expected_of_others(cell: Cell, rank: int) -> Expected:
    """A peer is the faulty one."""
    fault, victim = cell.fault, cell.victim
    if cell.phase == "in_close" and fault == "full":
        return _ends_well(rank)
    if cell.leaves:
        # what it wrote after its good-bye may be heard before rank 0 needs it again
        also = {GARBAGE} if fault in _WRITES and rank == 0 else set()
        return Expected(outcomes=frozenset({lost(victim)} | also))
    noticed = cell.phase == "idle" and fault not in ("stop", "closed_data")
    if rank:
        return Expected(
            outcomes=frozenset({lost(victim)}), noticed=noticed, acted=fault == "closed_data"
        )
    if fault in ("stop", "full"):
        return _one(late(victim))
    if fault in _WRITES:
        return _one(GARBAGE, words=(f"rank {victim} ", _WORDS[fault]), noticed=noticed)
    return _one(lost(victim), noticed=noticed)


_AFTER_JOIN = PHASES[1:]
# Why a cell cannot exist: by fault, phases, sides.
_IMPOSSIBLE: list[tuple[str, tuple[str, ...], tuple[str, ...], str]] = [
    (
        "uid",
        _AFTER_JOIN,
        SIDES,
        "the file is gone once all have joined, and the kernel keeps the uid of the time of the "
        "connect: nobody of another user can come, and no rank can become one",
    ),
    ("full", ("joining",), SIDES, "nothing is published before the join is over"),
    ("full", ("idle",), SIDES, "no message is sent while all are idle: nothing fills"),
    (
        "full",
        ("in_receive",),
        ("peer",),
        "a rank inside receive takes messages; one that never calls it is in_publish",
    ),
    (
        "full",
        ("in_publish", "in_receive", "in_close"),
        ("root",),
        "the peers send rank 0 nothing that fills a buffer but acknowledgements: in_confirm",
    ),
]


def impossible(cell: Cell) -> str | None:
    """Why there is no such cell; None if there is one."""
    for fault, phases, sides, why in _IMPOSSIBLE:
        if cell.fault == fault and cell.phase in phases and cell.side in sides:
            return why
    return None


def impossible_rows() -> list[str]:
    return [
        f"{fault} x {{{', '.join(phases)}}} on {' and '.join(sides)}: {why}"
        for fault, phases, sides, why in _IMPOSSIBLE
    ]


def all_combinations() -> list[Cell]:
    return [
        Cell(fault=fault, phase=phase, side=side, size=size)
        for size, fault, phase, side in itertools.product(SIZES, FAULTS, PHASES, SIDES)
    ]


def all_cells() -> list[Cell]:
    return [cell for cell in all_combinations() if impossible(cell) is None]


# The most telling phase of each fault: run by every `make test`.
_TELLING = {
    "kill": ("joining", "in_publish", "in_receive", "in_confirm", "in_close"),
    "kill_parent": ("in_receive",),
    "stop": ("in_publish", "in_confirm"),
    "closed_data": ("in_publish",),
    "closed_control": ("idle",),
    "garbage": ("in_receive",),
    "version": ("joining",),
    "epoch": ("in_receive",),
    "uid": ("joining",),
    "full": ("in_publish",),
    "slow": ("in_confirm",),
    "exec": ("in_receive",),
    "fork": ("in_receive",),
    "eintr": ("in_receive",),
    "jump": ("in_receive",),
}
_TELLING_OF_THREE = {
    ("kill", "in_publish", "root"),
    ("kill", "in_confirm", "peer"),
    ("kill", "joining", "peer"),
    ("stop", "in_publish", "peer"),
    ("garbage", "in_confirm", "peer"),
    ("closed_data", "in_publish", "root"),
}


def is_short(cell: Cell) -> bool:
    if cell.size == 2:
        return cell.phase in _TELLING[cell.fault]
    return cell.size == 3 and (cell.fault, cell.phase, cell.side) in _TELLING_OF_THREE
