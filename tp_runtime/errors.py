"""One tree for everything this library raises on purpose.

TpRuntimeError
+-- ConfigError (ValueError)            a setting is malformed; names its source
|   +-- EnvError                        ... and the source is an environment variable
+-- RequestError (ValueError)           a request cannot be served; other requests go on
+-- ModelError
|   +-- ModelNotFound                   --model names nothing that can be loaded
|   +-- ModelFormatError                the file is truncated, damaged or of another format
|   +-- UnsupportedModel                sound, but not something this runtime can run
+-- TpGroupError                        the tensor-parallel group cannot be formed
+-- CaptureError                        a graph could not be captured, or would be replayed wrongly
+-- HarvestError                        tokens of a step could not be delivered; others go on
+-- PagePoolError                       pages were released twice, leaked, or ran out for good
+-- SelectionError
|   +-- BackendUnavailable              no decode backend may serve this shape on this device
|   +-- PlanFormatError (ValueError)    a stored or received plan cannot be read
|   +-- PlanMismatch                    ranks hold different plans or captures
+-- BroadcastError
    +-- PeerLost                        a rank died, left or was told to stop
    +-- DeadlineExceeded (TimeoutError) a rank was silent for longer than allowed
    +-- ProtocolError                   bytes or calls that the protocol does not allow
    +-- HandshakeRefused                a join was refused; the message names the field
    +-- ChannelClosed                   the channel was closed in good order

This module imports nothing but the standard library, so that every part may use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class TpRuntimeError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigError(TpRuntimeError, ValueError):
    """A setting is malformed. The message names the setting, its source and what was expected."""


class EnvError(ConfigError):
    """An environment variable is missing or malformed. The message names the variable."""


class RequestError(TpRuntimeError, ValueError):
    """One request cannot be served as asked. Other requests are not affected."""


class ModelError(TpRuntimeError):
    """A model cannot be loaded or run."""


class ModelNotFound(ModelError):
    """The model reference names nothing that can be loaded; the message lists what would."""


class ModelFormatError(ModelError):
    """A model file is truncated, damaged, or not of the format it claims."""


class UnsupportedModel(ModelError):
    """A sound model that this runtime cannot run, or not at this tensor-parallel size."""


class TpGroupError(TpRuntimeError):
    """The tensor-parallel group cannot be formed or used."""


class CaptureError(TpRuntimeError):
    """A graph could not be captured, or replaying it would read something else than captured."""


class HarvestError(TpRuntimeError):
    """Tokens of a step could not be delivered. The requests it names were aborted, others go on.

    Raised one step late where two steps are in flight.

    Args:
        message: the whole sentence for the person who reads it.
        request_ids: of the requests that were aborted.
    """

    def __init__(self, message: str, *, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class PagePoolError(TpRuntimeError):
    """Pages were released twice, leaked, or are fewer than a single request needs."""


class SelectionError(TpRuntimeError):
    """A decode backend plan cannot be made, read or agreed on."""


class BackendUnavailable(SelectionError):
    """No decode backend may serve this shape on this device; the message lists the refusals."""


class PlanFormatError(SelectionError, ValueError):
    """A stored or received plan is truncated, of another version, or damaged."""


class PlanMismatch(SelectionError):
    """Ranks hold different plans or captured different things. Names the rank and the field."""


class BroadcastError(TpRuntimeError):
    """The CPU channel failed. Failure is terminal: every later call raises the same cause."""


class PeerLost(BroadcastError):
    """A rank died, left, or aborted.

    Args:
        message: the whole sentence for the person who reads it.
        rank: the rank that was lost (0 for the root).
        reason: the cause alone, without the rank.
    """

    def __init__(self, message: str, *, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason


class DeadlineExceeded(BroadcastError, TimeoutError):
    """A rank did not do its part in time.

    Args:
        message: who was late, for how long, and what was waited for.
        rank: the rank that was late; None when it is not known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class ProtocolError(BroadcastError):
    """Bytes or a sequence of calls that the protocol does not allow."""


class HandshakeRefused(BroadcastError):
    """A join was refused by the other side; the message names the field that differs."""


class ChannelClosed(BroadcastError):
    """The channel was closed in good order; nothing more will come."""
