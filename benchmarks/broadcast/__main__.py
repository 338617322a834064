"""The CPU broadcaster against its rivals, and against its targets.

    python benchmarks/broadcast [--quick] [--only REGEX] [--ranks 2,4,8] [--json FILE]
                                   [--vllm-wheel FILE] [--sglang-wheel FILE]

Real processes, all contenders interleaved in one run, rank 0 busy between steps, delivery counted
at the last peer after decoding; see arena.py for the method. Rivals that are not
installed are skipped by name; vLLM and SGLang can be taken out of a wheel that was downloaded with
`pip download --no-deps vllm`. A full run takes about six minutes and writes the JSON; with --quick
or --only it is written only where --json says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import alone
import arena
from measuring import Effort, machine_busy_s
from payloads import step_dict_bytes
from report import Results, print_report, targets
from rivals import Sources, compile_library, make_rivals, versions

from tp_runtime.broadcast.cores import cores_available
from tp_runtime.testing import RanksFailed, run_ranks

RESULTS = Path(__file__).resolve().parents[1] / "results"
SEED = 20261129
# One thread for each rank: its libraries must not start others beside the one that is measured.
ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
FULL = Effort(
    rounds=6,
    dropped={1: 20, 10: 10},
    counted={1: 90, 10: 35},
    patience_s=10.0,
    nice=0,
)
QUICK = Effort(
    rounds=2,
    dropped={1: 20, 10: 8},
    counted={1: 40, 10: 12},
    patience_s=2.0,
    nice=0,
)
KILLS = {False: 50, True: 10}
LIMIT_S = {False: 540.0, True: 180.0}


class Run:
    """One run: measures section by section, never longer than the deadline."""

    def __init__(self, args: argparse.Namespace, sources: Sources, effort: Effort) -> None:
        self._args = args
        self._sources = sources
        self._effort = effort
        self._end_s = time.monotonic() + LIMIT_S[args.quick]
        self.failed: dict[str, str] = {}
        self.foreign_cores: dict[str, float] = {}

    def wants(self, section: str) -> bool:
        return re.search(self._args.only, section) is not None

    def ranks(self, name: str, fn: Any, world_size: int, *args: Any) -> list[Any] | None:
        """What each rank returned; None if the section failed or there was no time left."""
        left_s = self._end_s - time.monotonic()
        if left_s < 5:
            self.failed[name] = "no time left"
            return None
        print(f"{name} ...", flush=True)
        busy_s, own_s, started_s = machine_busy_s(), _own_busy_s(), time.monotonic()
        try:
            return run_ranks(fn, world_size, left_s, args=args, env=ENV)
        except RanksFailed as error:
            self.failed[name] = str(error)
            return None
        finally:
            wall_s = time.monotonic() - started_s
            foreign_s = machine_busy_s() - busy_s - (_own_busy_s() - own_s)
            self.foreign_cores[name] = round(max(0.0, foreign_s / wall_s), 3)

    def rows(self, world_sizes: list[int]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        contenders, _ = arena.all_contenders(self._sources, ranks=8)
        if not any(self.wants(contender.name) for contender in contenders):
            return rows
        for ranks in world_sizes:
            with tempfile.TemporaryDirectory(prefix="tp_bench-") as folder:
                found = self.ranks(
                    f"contenders at {ranks} ranks",
                    arena.measure,
                    ranks,
                    folder,
                    dataclasses.asdict(self._sources),
                    dataclasses.asdict(self._effort),
                    self._args.only,
                    SEED + ranks,
                )
            rows += found[0] if found else []
        return rows

    def speed(self) -> dict[str, float] | None:
        if not self.wants("codec"):
            return None
        found = self.ranks("speed of this machine", alone.speed, 1)
        return found[0] if found else None

    def codec(self) -> dict[str, float] | None:
        if not self.wants("codec"):
            return None
        found = self.ranks("codec", alone.codec, 1, 15)
        return found[0] if found else None

    def idle(self) -> dict[str, float] | None:
        if not self.wants("idle"):
            return None
        modes = alone.MODES
        with tempfile.TemporaryDirectory(prefix="tp_bench-") as folder:
            found = self.ranks("idle", alone.idle, 1 + len(modes), folder, 3.0)
        if not found:
            return None
        return {mode: share for mode, (share,) in zip(modes, found[1:], strict=True)}

    def deaths(self) -> list[dict[str, Any]] | None:
        if not self.wants("kill"):
            return None
        found = self.ranks("kill", alone.deaths, 1, KILLS[self._args.quick], SEED)
        return found[0] if found else None


def _own_busy_s() -> float:
    """Seconds that this process and the ranks that have ended were running."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="about 90 s, for a first look")
    parser.add_argument("--only", default="", metavar="REGEX", help="contenders, codec, idle, kill")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, comma separated")
    parser.add_argument("--json", type=Path, help="where to write every row")
    parser.add_argument("--vllm-wheel", help="where vLLM is not installed: take its queue from it")
    parser.add_argument("--sglang-wheel", help="the same for SGLang's broadcast_pyobj")
    parser.add_argument(
        "--patience", type=float, help="seconds to wait for a quiet machine, in all"
    )
    parser.add_argument("--nice", type=int, default=0, help="priority of the ranks; -20 needs root")
    return parser.parse_args()


def _own_version() -> str:
    try:
        return importlib.metadata.version("tp-runtime")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def main() -> None:
    args = _arguments()
    world_sizes = [int(text) for text in args.ranks.split(",")]
    effort = dataclasses.replace(QUICK if args.quick else FULL, nice=args.nice)
    if args.patience is not None:
        effort = dataclasses.replace(effort, patience_s=args.patience / len(world_sizes))
    load_before, started_s = os.getloadavg(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tp_bench-") as folder:
        sources = Sources(
            library=compile_library(Path(folder)),
            vllm_wheel=args.vllm_wheel,
            sglang_wheel=args.sglang_wheel,
        )
        _, skipped = make_rivals(sources)
        run = Run(args, sources, effort)
        measured = {
            "speed": run.speed(),
            "codec": run.codec(),
            "idle": run.idle(),
            "deaths": run.deaths(),
            "rows": run.rows(world_sizes),
        }
    report: dict[str, Any] = {
        "what": "rank 0's encode to the last peer's decode, contenders interleaved in one run",
        "date": datetime.date.today().isoformat(),
        "machine": _cpu_name(),
        "cores": cores_available(),
        "kernel": platform.release(),
        "versions": {
            "python": platform.python_version(),
            "tp-runtime": _own_version(),
            **versions(sources),
        },
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "other_programs_used_cores": run.foreign_cores,
        "effort": dataclasses.asdict(effort),
        "seed": SEED,
        "took_s": round(time.monotonic() - started_s, 1),
        "step_dict_bytes": step_dict_bytes(),
        **measured,
        "skipped": {name: reason for name, reason in skipped.items() if run.wants(name)},
        "failed": run.failed,
    }
    report["targets"] = [
        dataclasses.asdict(target) | {"verdict": target.verdict}
        for target in targets(Results(report))
    ]
    print_report(report)
    foreign = ", ".join(f"{name} {cores:.2f}" for name, cores in run.foreign_cores.items())
    print(
        f"\n{report['cores']} cores, {report['machine']}, Linux {report['kernel']}, "
        f"{report['took_s']:.0f} s; load average {load_before[0]:.2f} before, "
        f"{report['load_average']['after'][0]:.2f} after"
        f"\ncores that other programs used meanwhile: {foreign}"
    )
    path = args.json
    if path is None and not args.quick and not args.only and args.ranks == "2,4,8":
        path = RESULTS / "broadcast.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {path}")
    for name, reason in run.failed.items():
        print(f"\n{name} failed: {reason}")
    if run.failed or any(row["wrong"] for row in report["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
