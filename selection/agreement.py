"""All ranks take the same plan, or none does.

Rank 0 confirms the plan. Every rank checks every backend the plan names on its own device; a
refusal comes back by name, all ranks drop those backends together, and the smaller plan is
confirmed again. No rank acts on a plan that was not committed. After capture, a second round
compares what was captured.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, Protocol

from tp_runtime.errors import (
    BroadcastError,
    PlanFormatError,
    PlanMismatch,
    ProtocolError,
    SelectionError,
)
from tp_runtime.selection.plan import BackendPlan
from tp_runtime.selection.registry import FACTORIES, Eligibility, available_backends

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tp_runtime.selection.base import DecodeShape, DeviceInfo

    Check = Callable[[BackendPlan], Mapping[str, str]]
    Progress = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

_MAX_DETAIL_CHARS = 4000
_ABSENT = object()


class Receipt(Protocol):
    """What a confirm returns: whether all ranks took it, and the refusals by rank."""

    @property
    def committed(self) -> bool: ...
    @property
    def refusals(self) -> Mapping[int, str]: ...
    @property
    def details(self) -> Mapping[int, str]: ...


class NewsChannel(Protocol):
    """The part of a broadcast channel that `announce` needs."""

    def publish(self, message: Any, /, *, timeout_s: float | None = None) -> None: ...


class AgreementChannel(Protocol):
    """The part of a broadcast channel that agreement needs."""

    def confirm(self, message: Any, /, *, timeout_s: float | None = None) -> Receipt: ...
    def receive(self, *, timeout_s: float | None = None) -> Any: ...
    def acknowledge(
        self, ok: bool, detail: str = "", *, timeout_s: float | None = None
    ) -> bool: ...
    def abort(self, reason: str) -> None: ...


def device_check(
    shape: DecodeShape,
    device: DeviceInfo,
    *,
    eligibility: Eligibility | None = None,
    factories: Mapping[str, str] = FACTORIES,
) -> Check:
    """A check of a plan against this rank's shape, device and settings.

    The check returns backend -> why this rank cannot run it, for every backend the plan names, and
    raises PlanMismatch if the plan is for another shape.
    """

    def check(plan: BackendPlan) -> Mapping[str, str]:
        if plan.shape is not None:
            for name in shape.__slots__:
                mine, theirs = getattr(shape, name), getattr(plan.shape, name)
                if mine != theirs:
                    raise PlanMismatch(
                        f"the plan is for another problem (field shape.{name}: "
                        f"expected {mine!r} here, got {theirs!r}); start all ranks with the same "
                        f"model, dtype and page size"
                    )
        listed = dict(
            available_backends(shape, device, eligibility=eligibility, factories=factories)
        )
        refusals = {}
        for name in plan.priority:
            reason = listed.get(name, "this rank knows no such backend")
            if reason is not None:
                refusals[name] = reason
        return refusals

    return check


def announce(
    channel: NewsChannel, stage: str, done: int, total: int, *, timeout_s: float | None = None
) -> None:
    """Tell the peers, who wait in `agree`, how far rank 0 is. Rank 0.

    Raises: BroadcastError: the channel failed, so that nobody waits for a plan any more.
    """
    progress = {"stage": stage, "done": done, "total": total}
    channel.publish({"kind": "progress", "progress": progress}, timeout_s=timeout_s)


def news_in(message: object) -> tuple[str, int, int] | None:
    """(stage, done, total) if the message is one that `announce` sent. Peers.

    Raises: ProtocolError: it should be one, and holds something else.
    """
    if not isinstance(message, dict) or message.get("kind") != "progress":
        return None
    match _message(message, "progress", "progress"):
        case {"stage": str(stage), "done": int(done), "total": int(total)}:
            return stage, done, total
        case news:
            raise ProtocolError(f"expected a stage and two counts, got {news!r}")


def agree(
    channel: AgreementChannel,
    plan: BackendPlan | None,
    *,
    check: Check,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> BackendPlan:
    """Agree on a plan; returns the committed one, equal on every rank.

    Args:
        channel: ordered, with two-phase confirm.
        plan: the plan on rank 0, None on the other ranks.
        check: backend -> refusal on this rank, see `device_check`.
        timeout_s: for each wait; the channel's own if None.
        progress: called on the peers with what rank 0 announces until it has a plan.

    Raises: PlanMismatch: a rank cannot read or use the plan as such; names the rank.
        BackendUnavailable: the ranks have no backend in common. BroadcastError: the channel failed.
    """
    if plan is None:
        return _follow(channel, check, timeout_s, progress)
    return _lead(channel, plan, check, timeout_s)


def agree_alike(
    channel: AgreementChannel,
    what: str,
    values: Mapping[str, Any],
    *,
    root: bool,
    detail: str = "",
    timeout_s: float | None = None,
) -> Mapping[int, str]:
    """Make sure that every rank holds the same values.

    Args:
        what: names the values in errors, such as "the configuration".
        values: one by field name; what JSON can hold.
        root: True on rank 0, whose values are the expected ones.
        detail: a short text that a peer adds, at most 4000 bytes.

    Returns:
        The detail of each peer by rank, on rank 0; empty elsewhere.

    Raises: PlanMismatch: a rank differs; names the rank and the fields. Raised on every rank.
    """
    mine = json.loads(json.dumps(dict(sorted(values.items()))))
    if root:
        message = {"kind": "alike", "alike": {"what": what, "values": mine}}
        receipt = channel.confirm(message, timeout_s=timeout_s)
        if not receipt.committed:
            listed = "; ".join(f"rank {r}: {why}" for r, why in sorted(receipt.refusals.items()))
            error = PlanMismatch(f"{what} differs between ranks: {listed}")
            channel.abort(str(error))
            raise error
        return receipt.details
    theirs = _message(channel.receive(timeout_s=timeout_s), "alike", "alike")
    difference = _difference(theirs, what, mine)
    answer = detail if difference is None else difference[:_MAX_DETAIL_CHARS]
    try:
        taken = channel.acknowledge(difference is None, answer, timeout_s=timeout_s)
    except BroadcastError:
        # rank 0 ends the channel as soon as it knows, which may overtake its decision
        if difference is None:
            raise
    if difference is not None:
        raise PlanMismatch(f"{what} differs between this rank and rank 0: {difference}")
    if not taken:
        raise PlanMismatch(f"{what} differs between rank 0 and another rank; see rank 0's error")
    return {}


def agree_capture(
    channel: AgreementChannel,
    descriptor: Mapping[str, str | int],
    *,
    root: bool,
    timeout_s: float | None = None,
) -> str:
    """Compare what every rank captured; returns the capture digest (sha256, hex).

    Args:
        descriptor: what this rank captured, one value per field.
        root: True on rank 0, whose descriptor is the expected one.

    Raises: PlanMismatch: a rank captured something else; names the rank and the field.
    """
    agree_alike(channel, "the capture", descriptor, root=root, timeout_s=timeout_s)
    text = json.dumps(dict(sorted(descriptor.items())), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _lead(
    channel: AgreementChannel, plan: BackendPlan, check: Check, timeout_s: float | None
) -> BackendPlan:
    try:
        plan = _dropped(plan, {0: check(plan)})
        while True:
            message = {"kind": "plan", "plan": plan.to_bytes()}
            receipt = channel.confirm(message, timeout_s=timeout_s)
            if receipt.committed:
                return plan
            refused: dict[int, Mapping[str, str]] = {}
            for rank, detail in sorted(receipt.refusals.items()):
                names = _refused_names(detail, plan)
                if names is None:
                    raise PlanMismatch(f"rank {rank} cannot take plan {plan.digest[:12]}: {detail}")
                refused[rank] = names
            if not refused:
                raise PlanMismatch(
                    f"plan {plan.digest[:12]} was not committed, for no given reason"
                )
            plan = _dropped(plan, refused)
    except SelectionError as error:
        # the peers wait for the next plan: tell them that none will come
        channel.abort(str(error))
        raise


def _follow(
    channel: AgreementChannel, check: Check, timeout_s: float | None, progress: Progress | None
) -> BackendPlan:
    while True:
        message = channel.receive(timeout_s=timeout_s)
        news = news_in(message)
        if news is not None:
            log.info("rank 0: %s %d of %d", *news)
            if progress is not None:
                progress(*news)
            continue
        data = _message(message, "plan", "plan")
        try:
            if not isinstance(data, bytes):
                raise PlanFormatError(f"plan: expected bytes, got {type(data).__name__}")
            plan = BackendPlan.from_bytes(data)
            refusals = check(plan)
        except SelectionError as error:
            channel.acknowledge(False, str(error)[:_MAX_DETAIL_CHARS], timeout_s=timeout_s)
            raise
        for name, reason in refusals.items():
            log.warning("this rank refuses decode backend %s: %s", name, reason)
        detail = json.dumps({"refused": refusals}) if refusals else ""
        if channel.acknowledge(not refusals, detail, timeout_s=timeout_s):
            return plan


def _dropped(plan: BackendPlan, refused: Mapping[int, Mapping[str, str]]) -> BackendPlan:
    names = {name for reasons in refused.values() for name in reasons}
    if not names:
        return plan
    for rank, reasons in refused.items():
        for name, reason in reasons.items():
            log.warning("decode backend %s is dropped: rank %d: %s", name, rank, reason)
    return plan.without(names)


def _refused_names(detail: str, plan: BackendPlan) -> Mapping[str, str] | None:
    """The refusals in an acknowledgement's detail; None if it says something else."""
    try:
        refused = json.loads(detail)["refused"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(refused, dict) or not refused or not refused.keys() <= set(plan.priority):
        return None
    return {name: str(reason) for name, reason in refused.items()}


def _message(message: Any, kind: str, field: str) -> Any:
    got = message.get("kind") if isinstance(message, dict) else type(message).__name__
    if got != kind or set(message) != {"kind", field}:
        raise ProtocolError(f"expected a message of kind {kind!r}, got {got!r}")
    return message[field]


def _difference(theirs: Any, what: str, mine: dict[str, Any]) -> str | None:
    """The fields in which rank 0's values are others than mine; None if there are none."""
    if not isinstance(theirs, dict) or not isinstance(theirs.get("values"), dict):
        return f"expected fields, got {type(theirs).__name__}"
    if theirs.get("what") != what:
        return f"rank 0 is at {theirs.get('what')!r}, this rank is not"
    expected = theirs["values"]
    differing = [
        f"field {name}: expected {expected.get(name, 'nothing')}, got {mine.get(name, 'nothing')}"
        for name in sorted({*expected, *mine})
        if expected.get(name, _ABSENT) != mine.get(name, _ABSENT)
    ]
    return "; ".join(differing) or None
