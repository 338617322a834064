"""The tables of the broadcast benchmark: every row, where ours loses, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from contenders import AWAKE

Row = Mapping[str, Any]

OURS = "ours, "
BALANCED, LATENCY, EFFICIENT = "ours, balanced", "ours, latency", "ours, efficient"
C_SPIN, VLLM, ZMQ, OBJECTS = (
    "C SEQPACKET, spinning",
    "vLLM MessageQueue",
    "zmq PUB/SUB",
    "broadcast_object_list",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A goal, what was measured, and whether it is met; met None: not measured."""

    text: str
    measured: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return {True: "met", False: "NOT met", None: "not measured"}[self.met]


class Results:
    """All that a run measured, looked up by what it is."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.report = report
        self.rows: list[Row] = list(report["rows"])

    def row(self, contender: str, payload: str, ranks: int, cadence_ms: int) -> Row | None:
        for row in self.rows:
            if (
                row["contender"] == contender
                and row["payload"] == payload
                and row["ranks"] == ranks
                and row["cadence_ms"] == cadence_ms
                and not row["jitter_us"]
            ):
                return row
        return None

    def p50(self, contender: str, payload: str, ranks: int, cadence_ms: int) -> float | None:
        row = self.row(contender, payload, ranks, cadence_ms)
        return None if row is None else float(row["p50_us"])


def print_report(report: Mapping[str, Any]) -> None:
    results = Results(report)
    if results.rows:
        _print_rows(results)
        _print_losses(results)
        _print_quality(results)
    _print_alone(report)
    for name, reason in report["skipped"].items():
        print(f"{name:26s} skipped: {reason}")
    for name, reason in report["failed"].items():
        print(f"{name:26s} FAILED: {reason.splitlines()[0]}")
    print_targets(targets(results))


# ---- rows --------------------------------------------------------------------------------


def _print_rows(results: Results) -> None:
    sizes = sorted({row["ranks"] for row in results.rows})
    cores = results.report["cores"]
    groups = dict.fromkeys(
        (row["payload"], row["cadence_ms"], row["jitter_us"])
        for row in results.rows
        if row["contender"] != AWAKE
    )
    print(
        "\nus from rank 0's encode to the last peer's decode: p50 / p99, [in rank 0's call],"
        " CPU of a waiter\n* more ranks than cores   ~ disturbed by other programs"
    )
    for payload, cadence_ms, jitter_us in sorted(groups, key=lambda g: (g[1], g[0], g[2])):
        jitter = f" with {jitter_us:g} us of jitter" if jitter_us else ""
        print(f"\n{f'{payload}, every {cadence_ms} ms{jitter}':26s}", end="")
        for ranks in sizes:
            crowded = "*" if ranks > cores else ""
            print(f"{f'{ranks} ranks{crowded}':>38s}", end="")
        print()
        names = dict.fromkeys(row["contender"] for row in results.rows)
        for name in names:
            found = [
                next(
                    (
                        row
                        for row in results.rows
                        if (row["contender"], row["payload"]) == (name, payload)
                        and (row["cadence_ms"], row["jitter_us"]) == (cadence_ms, jitter_us)
                        and row["ranks"] == ranks
                    ),
                    None,
                )
                for ranks in sizes
            ]
            if name != AWAKE and any(found):
                print(f"{name:26s}" + "".join(f"{_cell(row):>38s}" for row in found))


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    mark = " " if row["undisturbed"] else "~"
    lost = f" WRONG {row['wrong']}" if row["wrong"] else ""
    return (
        f"{_us(row['p50_us'])} / {_us(row['p99_us'])} [{_us(row['send_p50_us'])}] "
        f"{100 * row['waiter_cpu']:5.1f}%{mark}{lost}"
    )


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _print_losses(results: Results) -> None:
    """Cells in which a rival beats our default mode, and by how much."""
    print("\nWhere we lose (ours, balanced, against each rival; same row of the tables above)")
    found = False
    for row in results.rows:
        if row["contender"].startswith(OURS):
            continue
        ours = results.row(BALANCED, row["payload"], row["ranks"], row["cadence_ms"])
        if ours is None:
            continue
        lost = [
            f"{what} {_us(scale * ours[key])} > {_us(scale * row[key])}{unit}"
            for what, key, scale, unit in (
                ("p50", "p50_us", 1, " us"),
                ("p99", "p99_us", 1, " us"),
                ("rank 0 in the call", "send_p50_us", 1, " us"),
                ("waiter CPU", "waiter_cpu", 100, " %"),
            )
            if ours[key] > 1.05 * row[key]
        ]
        if lost:
            found = True
            print(
                f"  {row['contender']:24s}{row['payload']:6s} {row['ranks']} ranks, "
                f"{row['cadence_ms']:2d} ms: {'; '.join(lost)}"
            )
    if not found:
        print("  nowhere")


def _print_quality(results: Results) -> None:
    rows = results.rows
    wrong = sum(row["wrong"] for row in rows)
    disturbed = sum(not row["undisturbed"] for row in rows)
    print(
        f"\n{sum(row['messages'] for row in rows)} messages counted, {wrong} lost or out of "
        f"order; {disturbed} of {len(rows)} cells disturbed by other programs"
    )


def _print_alone(report: Mapping[str, Any]) -> None:
    if speed := report.get("speed"):
        parts = [f"{name.replace('_', ' ')} {us:.2f} us" for name, us in speed.items()]
        print(f"this machine, now          {', '.join(parts[:4])}\n{'':27s}{', '.join(parts[4:])}")
    if codec := report.get("codec"):
        print(
            f"steady step of 64 rows     encode {codec['encode_us']:.2f} us + decode "
            f"{codec['decode_us']:.2f} us hot; on the wire {codec['wire_bytes_p50']:.0f} bytes "
            f"(median, {codec['header_bytes']} of them header); the rivals' dict, pickled: "
            f"{report['step_dict_bytes']} bytes"
        )
    if idle := report.get("idle"):
        shares = ", ".join(f"{mode} {100 * share:.2f} %" for mode, share in idle.items())
        print(f"idle waiter for 3 s        {shares} of a core")
    for row in report.get("deaths") or ():
        wrong = f"; WRONG: {row['wrong']}" if row["wrong"] else ""
        print(
            f"kill -9, {row['ranks']} ranks, {row['situation']:11s}p50 {row['p50_ms']:.1f}  "
            f"p99 {row['p99_ms']:.1f}  max {row['max_ms']:.1f} ms over {row['kills']} kills{wrong}"
        )


# ---- targets -----------------------------------------------------------------------------


def print_targets(found: Iterable[Target]) -> None:
    found = list(found)
    width = max(len(target.text) for target in found)
    print(f"\n{'target':{width}s}  {'measured':>22s}  ")
    for target in found:
        print(f"{target.text:{width}s}  {target.measured:>22s}  {target.verdict}")


def targets(results: Results) -> list[Target]:
    return [
        *_speed_targets(results),
        *_crowded_targets(results),
        *_single_targets(results),
    ]


def _speed_targets(results: Results) -> list[Target]:
    def ratio(over: str, under: str, payload: str, cadence_ms: int) -> float | None:
        return _ratio(results, over, under, payload, 2, cadence_ms)

    found = [
        _at_most(
            "latency, 1 KiB, 2 ranks, 1 ms: p50 over C spinning <= 2.2",
            ratio(LATENCY, C_SPIN, "1 KiB", 1),
            2.2,
            "x",
        ),
        _at_least(
            "latency, 1 KiB, 2 ranks, 1 ms: vLLM's p50 over ours >= 2.5",
            ratio(VLLM, LATENCY, "1 KiB", 1),
            2.5,
        ),
    ]
    for cadence_ms, most_us, most_cpu, faster in ((1, 9.0, 30.0, 4.0), (10, 22.0, 5.0, 2.0)):
        row = results.row(BALANCED, "step", 2, cadence_ms)
        where = f"balanced, step, 2 ranks, {cadence_ms} ms:"
        p50_us = None if row is None else float(row["p50_us"])
        cpu = None if row is None else 100 * float(row["waiter_cpu"])
        found += [
            _at_most(f"{where} p50 <= {most_us:g} us", p50_us, most_us, " us"),
            _at_most(f"{where} waiter <= {most_cpu:g} % of a core", cpu, most_cpu, " %"),
            _at_least(
                f"{where} vLLM's p50 over ours >= {faster:g}",
                ratio(VLLM, BALANCED, "step", cadence_ms),
                faster,
            ),
        ]
    return found


def _crowded_targets(results: Results) -> list[Target]:
    found = []
    for mode in (BALANCED, EFFICIENT):
        for cadence_ms in (1, 10):
            for rival, least in ((VLLM, 2.0), (ZMQ, 1.6), (OBJECTS, 20.0)):
                found.append(
                    _at_least(
                        f"{mode.removeprefix(OURS)}, step, 8 ranks, {cadence_ms} ms: "
                        f"p50 of {rival} over ours >= {least:g}",
                        _ratio(results, rival, mode, "step", 8, cadence_ms),
                        least,
                    )
                )
    return found


def _single_targets(results: Results) -> list[Target]:
    report = results.report
    awake = results.row(AWAKE, "step", 8, 1)
    codec, idle, deaths = report.get("codec"), report.get("idle"), report.get("deaths")
    late_ms = _largest(deaths, lambda row: row["p99_ms"])
    if deaths and any(row["wrong"] for row in deaths):
        late_ms = float("inf")
    large = [results.p50(mode, "1 MiB", 8, 10) for mode in (BALANCED, EFFICIENT)]
    return [
        _at_most(
            "rank 0 inside publish, step, 8 ranks, peers awake: p50 <= 14 us",
            None if awake is None else float(awake["send_p50_us"]),
            14.0,
            " us",
        ),
        _at_most(
            "steady step, encode + decode <= 2.5 us",
            codec["both_us"] if codec else None,
            2.5,
            " us",
        ),
        _at_most(
            "steady step on the wire, median <= 64 bytes",
            codec["wire_bytes_p50"] if codec else None,
            64,
            " bytes",
        ),
        _at_most(
            "idle waiter, worst mode <= 0.5 % of a core",
            100 * max(idle.values()) if idle else None,
            0.5,
            " %",
        ),
        _at_most(
            "1 MiB, 8 ranks, every peer reads all of it: p50 <= 2000 us",
            None if None in large else max(value for value in large if value is not None),
            2000.0,
            " us",
        ),
        _at_most("kill -9 until all know, worst p99 <= 20 ms", late_ms, 20.0, " ms"),
    ]


def _largest(rows: Iterable[Row] | None, of: Callable[[Row], float]) -> float | None:
    return max((float(of(row)) for row in rows or ()), default=None)


def _ratio(
    results: Results, over: str, under: str, payload: str, ranks: int, cadence_ms: int
) -> float | None:
    above = results.p50(over, payload, ranks, cadence_ms)
    below = results.p50(under, payload, ranks, cadence_ms)
    return None if above is None or below is None else above / below


def _at_most(text: str, value: float | None, limit: float, unit: str) -> Target:
    measured = "-" if value is None else f"{value:.2f}{unit}"
    return Target(text=text, measured=measured, met=None if value is None else value <= limit)


def _at_least(text: str, value: float | None, limit: float) -> Target:
    measured = "-" if value is None else f"{value:.2f}x"
    return Target(text=text, measured=measured, met=None if value is None else value >= limit)
