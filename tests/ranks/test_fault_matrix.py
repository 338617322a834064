"""What every rank sees when one of them fails: fault x phase x side x number of ranks.

Each cell is a group of real processes with deadlines of 0.3 s. Every survivor must raise the
right exception, which names the right rank, within its deadline and 0.5 s, or none at all where
the fault is harmless; and no descriptor, file, thread or process may be left. See `cells`
for what is expected where.

    pytest tests/ranks/test_fault_matrix.py -s                     # all, with the table
    pytest tests/ranks/test_fault_matrix.py -s -k "root-2 or peer-2"   # two ranks only
    pytest tests/ranks/test_fault_matrix.py -k kill-in_receive-peer-8  # one cell
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks.faults import cells
from tests.ranks.faults.cells import GRACE_S, PHASES, SIDES, SIZES, TIMEOUT_S, Cell, expected
from tests.ranks.faults.harness import GroupResult, Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 8.0
# Anything that the faulty rank may say about its own end; it may not go on.
OWN_ENDS = {
    "PeerLost",
    "DeadlineExceeded",
    "ProtocolError",
    "HandshakeRefused",
    "ChannelClosed",
    "quiet",
}
# By cell: what the table shows.
SHOWN: dict[Cell, str] = {}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as process:
        yield process


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Printed at the end; seen with -s."""
    yield
    for size in SIZES:
        if any(cell.size == size for cell in SHOWN):
            print(f"\n\n{size} ranks: slowest survivor, ms; +: no error, as it should be")
            _print_table(size)
    print("\nImpossible:\n- " + "\n- ".join(cells.impossible_rows()))


def _print_table(size: int) -> None:
    columns = [(phase, side) for phase in PHASES for side in SIDES]
    print(f"{'':15}" + "".join(f"{phase:>18}" for phase in PHASES))
    print(f"{'':15}" + "".join(f"{side:>9}" for _, side in columns))
    for fault in cells.FAULTS:
        row = f"{fault:15}"
        for phase, side in columns:
            cell = Cell(fault=fault, phase=phase, side=side, size=size)
            shown = "-" if cells.impossible(cell) else SHOWN.get(cell, ".")
            row += f"{shown:>9}"
        print(row)


def _parameters() -> list[Any]:
    return [
        pytest.param(cell, id=cell.id, marks=() if cells.is_short(cell) else pytest.mark.long)
        for cell in cells.all_cells()
    ]


@pytest.mark.parametrize("cell", _parameters())
def test_fault(nursery: Nursery, cell: Cell) -> None:
    if cell.fault == "uid" and os.geteuid() != 0:
        SHOWN[cell] = "no root"
        pytest.skip(f"{cell.id}: only root can start a process of another user")
    SHOWN[cell] = "FAILED"
    result = nursery.run(
        "tests.ranks.faults.play:run_cell",
        cell.size,
        args=asdict(cell),
        limit_s=LIMIT_S,
        awaited=cell.survivors,
        folder_mode=0o755 if cell.fault == "uid" else 0o700,
    )
    problems = [*_problems_of_group(cell, result)]
    for rank in cell.survivors:
        problems += [f"rank {rank}: {what}" for what in _problems_of_survivor(cell, rank, result)]
    if cell.victim not in cell.survivors:
        problems += [f"faulty rank: {what}" for what in _problems_of_victim(cell, result)]
    reports = "\n".join(str(report) for report in result.reports.values())
    assert not problems, "\n".join([cell.id, *problems, reports, result.stderr])
    SHOWN[cell] = _shown(cell, result)


def _shown(cell: Cell, result: GroupResult) -> str:
    reports = [result.reports[rank] for rank in cell.survivors]
    ended = {report["outcome"] for report in reports if report is not None}
    if ended <= {"ok", "ChannelClosed"}:
        return "+"
    slowest_s = max(report["elapsed_s"] for report in reports if report is not None)
    return f"{slowest_s * 1e3:.0f}"


def _problems_of_group(cell: Cell, result: GroupResult) -> Iterator[str]:
    if result.timed_out:
        yield f"a survivor said nothing within {LIMIT_S:g} s"
    if "Traceback" in result.stderr or "Fatal" in result.stderr:
        yield "something was printed"
    if result.left != (["channel"] if cell.stale_file else []):
        yield f"left in the folder: {result.left}"
    if result.left_by_next_run:
        yield f"not removed by the next run: {result.left_by_next_run}"
    # a killed rank cannot reap its child, which then belongs to nobody
    if result.strays != (cell.fault == "kill_parent" and cell.victim not in cell.survivors):
        yield f"{result.strays} processes were left"


def _problems_of_survivor(cell: Cell, rank: int, result: GroupResult) -> Iterator[str]:
    report = result.reports[rank]
    if report is None:
        yield f"no report, exit code {result.exits[rank]}"
        return
    if "crash" in report:
        yield report["crash"]
        return
    want = expected(cell, rank)
    outcome = (report["outcome"], report["named"])
    if outcome not in want.outcomes:
        yield f"expected {sorted(want.outcomes, key=str)}, got {outcome}: {report['message']}"
    for word in want.words:
        if word not in report["message"]:
            yield f"{word!r} is not in the message: {report['message']}"
    if report["elapsed_s"] > TIMEOUT_S + GRACE_S and not cell.goes_on:
        yield f"took {report['elapsed_s']:.3f} s, deadline {TIMEOUT_S} s and {GRACE_S} s"
    if want.noticed and report["noticed_s"] is None:
        yield "the failure was not seen on the descriptor before a call"
    if report["acted"] and not want.acted:
        yield "it acted on a message that not all ranks had accepted"
    if not report["same"]:
        yield "a later call raised something else"
    if not report["readable"]:
        yield "the descriptor of fileno() does not tell the truth"
    if cell.goes_on:
        yield from _problems_of_good_end(cell, rank, report, result)
    yield from _left_by(report)


def _problems_of_good_end(
    cell: Cell, rank: int, report: dict[str, Any], result: GroupResult
) -> Iterator[str]:
    root = result.reports[0]
    sent = root["sent"] if root is not None and "sent" in root else -1
    if rank and report["received"] != sent:
        yield f"received {report['received']} of {sent} messages"
    if cell.phase != "in_close" and not report["acted"]:
        yield "the plan was not committed"


def _left_by(report: dict[str, Any]) -> Iterator[str]:
    if report["leaked"]:
        yield f"open descriptors: {report['leaked']}"
    if report["threads"] != 1:
        yield f"{report['threads']} threads"
    if report["children"]:
        yield f"{report['children']} children"
    yield from report["problems"]


def _problems_of_victim(cell: Cell, result: GroupResult) -> Iterator[str]:
    if cell.fault in ("kill", "kill_parent"):
        if result.exits[cell.victim] != -9:
            yield f"it was to be killed, exit code {result.exits[cell.victim]}"
        return
    report = result.reports[cell.victim]
    if report is None:
        yield f"no report, exit code {result.exits[cell.victim]}"
        return
    if "crash" in report:
        yield report["crash"]
        return
    ends = OWN_ENDS | ({"ok"} if cell.phase == "in_close" else set())
    if report["outcome"] not in ends:
        yield f"it ended with {report['outcome']}: {report['message']}"
    # closed_data accepts the plan and is told to go on or not; a frozen rank 0 has no answers
    if report["acted"] and cell.fault != "closed_data":
        yield "it acted although a rank had failed"
    if report["outcome"] != "quiet":
        yield from _left_by(report)


def test_every_combination_is_tested_or_has_a_reason() -> None:
    combinations = cells.all_combinations()
    assert len(combinations) == len(set(combinations)) == 15 * 6 * 2 * 3
    without = [cell for cell in combinations if cells.impossible(cell) is not None]
    assert len(without) + len(cells.all_cells()) == len(combinations)
    assert all(cells.impossible(cell) for cell in without)
    for fault in cells.FAULTS:
        assert any(cell.fault == fault and cells.is_short(cell) for cell in combinations)
