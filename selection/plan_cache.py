"""Measured plans of earlier starts, one JSON file for each fingerprint.

A file is used only if it is whole and its fingerprint is equal in every field; anything else is
said in a line of the log and measured again. Rank 0 alone reads and writes, and its plan goes
through the same agreement as a fresh one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import PlanFormatError, SelectionError
from tp_runtime.regular_file import read_regular
from tp_runtime.selection.atomic_file import replace_file
from tp_runtime.selection.bench import BenchReport
from tp_runtime.selection.plan import BackendPlan
from tp_runtime.selection.rule import Sample
from tp_runtime.selection.strict_json import (
    MAX_BYTES,
    array,
    canonical,
    number,
    object_of,
    parse,
    texts,
    typed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Fingerprint = Mapping[str, Any]

log = logging.getLogger(__name__)

FORMAT = "tp_runtime.cached_plan"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """A measured plan, and the measurements that it was made from."""

    plan: BackendPlan
    report: BenchReport


class PlanCache:
    """A folder of measured plans. It is made when the first one is kept.

    Args:
        folder: private to this user; what lies there decides which kernels run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, fingerprint: Fingerprint) -> Path:
        digest = hashlib.sha256(canonical(dict(fingerprint))).hexdigest()
        return self._folder / f"{digest[:32]}.json"

    def load(self, fingerprint: Fingerprint) -> KeptPlan | None:
        """The plan that was kept for exactly this fingerprint; None, and a line in the log if a
        file is there that is not that."""
        path = self.path_of(fingerprint)
        try:
            return _read(read_regular(path, most_bytes=MAX_BYTES), fingerprint)
        except FileNotFoundError:
            log.info("no plan is kept for this device and model: measuring")
        except (OSError, SelectionError) as error:
            log.warning("the kept plan %s is not used, measuring again: %s", path, error)
        return None

    def store(self, fingerprint: Fingerprint, kept: KeptPlan) -> bool:
        """Keep a plan, replacing an older one in one step. False, and a line in the log, if the
        folder cannot be written."""
        path = self.path_of(fingerprint)
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "fingerprint": dict(fingerprint),
            "digest": kept.plan.digest,
            "plan": json.loads(kept.plan.to_bytes()),
            "samples": [asdict(sample) for sample in kept.report.samples],
            "refusals": dict(kept.report.refusals),
            "seconds": kept.report.seconds,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(path, json.dumps(document, allow_nan=False) + "\n")
        except OSError as error:
            log.warning(
                "the plan is not kept, the next start measures again: %s cannot be written: %s",
                path,
                error.strerror or error,
            )
            return False
        return True


def _read(data: bytes, fingerprint: Fingerprint) -> KeptPlan:
    """Raises PlanFormatError or SelectionError for anything but what `store` wrote for this."""
    names = ("format", "version", "fingerprint", "digest", "plan", "samples", "refusals", "seconds")
    found = object_of(parse(data, "file"), "file", names)
    if (found["format"], found["version"]) != (FORMAT, FORMAT_VERSION):
        raise PlanFormatError(
            f"expected {FORMAT} version {FORMAT_VERSION}, got "
            f"{found['format']!r} version {found['version']!r}"
        )
    if found["fingerprint"] != fingerprint:
        raise PlanFormatError("it was measured under other circumstances than its name says")
    plan = BackendPlan.from_bytes(canonical(found["plan"]))
    if plan.digest != found["digest"]:
        raise PlanFormatError(
            f"its digest is {found['digest']!r}, but the plan in it has {plan.digest!r}"
        )
    samples = array(found["samples"], "samples")
    report = BenchReport(
        samples=tuple(typed(Sample, item, f"samples[{i}]") for i, item in enumerate(samples)),
        refusals=texts(found["refusals"], "refusals"),
        seconds=number(found["seconds"], "seconds"),
    )
    return KeptPlan(plan=plan, report=report)
