"""How one rank is connected to the others, and the one failure that ends all of it.

The channel comes first, and the group is formed while it is watched, so that a rank that dies from
then on is seen by all.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster
from tp_runtime.device_pulse import DevicePulse, device_probe
from tp_runtime.errors import BroadcastError, ConfigError, TpGroupError, TpRuntimeError
from tp_runtime.group import TpGroup
from tp_runtime.ranks import RankInfo
from tp_runtime.rendezvous import channel_address
from tp_runtime.selection import agree_alike
from tp_runtime.watcher import FailureWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tp_runtime.broadcast import Message, WaitMode
    from tp_runtime.config import RuntimeConfig
    from tp_runtime.watcher import OnFailure

__all__ = ["Connection", "resolve_device"]

log = logging.getLogger(__name__)

FAILURE_NEWS_S = 0.5
"""How long an error of a collective waits for the channel to say which rank caused it."""

ALIKE = (
    "model", "dtype", "max_batch_size", "max_seq_len", "kv_block_size", "kernel_page_size",
    "kv_cache_tokens", "prefill_chunk_tokens", "decode_buckets", "enable_dynamic_decode_backend",
    "selection_mode", "decode_backend", "disable_decode_backend", "all_reduce",
)  # fmt: skip
"""Settings that must be equal on every rank; the others are a rank's own affair."""


class Connection:
    """The channel, its watcher and the group of one rank. It is used by one thread.

    Args:
        config: of the runtime.
        group: the host's own, which stays open at the end; None: formed by :meth:`open`.
        on_failure: what the watcher does; None: what the configuration says.

    Attributes:
        rank: in the group; before :meth:`open` known only if a group was passed.
        failure: what ended this rank for good; None while all is well.
        closed: set by whoever has begun to close what is connected.

    Raises:
        TpGroupError: the host's group is not what the configuration asks for.
    """

    def __init__(
        self, config: RuntimeConfig, *, group: TpGroup | None, on_failure: OnFailure | None
    ) -> None:
        if group is not None and config.tp_size not in (None, group.size):
            raise TpGroupError(
                f"tp_size is {config.tp_size}, but the group that was passed has {group.size} ranks"
            )
        self.rank = 0 if group is None else group.rank
        self.failure: BaseException | None = None
        self.closed = False
        self._pid = os.getpid()
        self._config = config
        self._on_failure: OnFailure = on_failure or config.on_failure  # type: ignore[assignment]
        self._channel: CpuTpBroadcaster | None = None
        self._watcher: FailureWatcher | None = None
        self._pulse: DevicePulse | None = None
        self._group = group
        self._owns_group = group is None

    def open(self, *, rehearse: Callable[[Message], object]) -> None:
        """Join the channel, watch it, form the group, compare settings, in this order.

        Args:
            rehearse: what the channel does with messages while it waits.
        """
        config, group = self._config, self._group
        if group is not None:
            channel = self._channel = _join_by_group(config, group)
            self._watch(channel)
        else:
            info = RankInfo.from_env(tp_size=config.tp_size)
            self.rank = info.tp_rank
            device = resolve_device(config, info.local_rank)
            channel = self._channel = _join_by_environment(config, info)
            self._watch(channel)
            group = self._group = TpGroup.create(
                info,
                device=device,
                timeout_s=config.join_timeout_s,
                peer_memory=config.all_reduce != "nccl",
                failure=lambda: channel.failure,
            )
        channel.rehearse_with(rehearse)
        if self._watcher is not None:
            self._watcher.watch_group(group)
            if group.device.type == "cuda":
                self._pulse = DevicePulse(
                    device_probe(group.device),
                    gave_up=lambda: group.gave_up,
                    tell=channel.abort,
                )
        agree_alike(
            channel,
            "the configuration",
            {name: getattr(config, name) for name in ALIKE},
            root=group.rank == 0,
            timeout_s=config.join_timeout_s,
        )

    def _watch(self, channel: CpuTpBroadcaster) -> None:
        if channel.world_size > 1:
            self._watcher = FailureWatcher(
                channel,
                rank=self.rank,
                on_failure=self._on_failure,
                start_timeout_s=self._config.broadcast_timeout_s,
            )

    @property
    def channel(self) -> CpuTpBroadcaster:
        """Raises TpRuntimeError: not opened."""
        if self._channel is None:
            raise TpRuntimeError("the engine has not been started: call start() first")
        return self._channel

    @property
    def group(self) -> TpGroup:
        """Raises TpRuntimeError: not opened."""
        if self._group is None:
            raise TpRuntimeError("the engine has not been started: call start() first")
        return self._group

    def expect_steps(self) -> None:
        """From here on the ranks run steps, which take less than forming and loading did."""
        if self._watcher is not None:
            self._watcher.started()
        if self._owns_group:
            self.group.set_timeout(self._config.broadcast_timeout_s)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, to which nothing of the connection belongs."""
        return os.getpid() != self._pid

    # ---- failure -----------------------------------------------------------------------------

    def raise_if_ended(self) -> None:
        """Raises what ended this rank, or TpRuntimeError if it has been closed."""
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise TpRuntimeError("the engine has been closed")

    @contextmanager
    def terminal(self) -> Iterator[None]:
        """What fails in here ends every rank, for good, with one cause."""
        self.raise_if_ended()
        try:
            yield
        except BaseException as error:
            cause = self._fail(error)
            if cause is error:
                raise
            raise cause from error

    def _fail(self, error: BaseException) -> BaseException:
        """Tell the others, and find the cause: a collective only says that something broke."""
        channel = self._channel
        if channel is not None and error is not channel.failure:
            # what a collective raises says that something broke; the channel says who broke it
            if isinstance(error, RuntimeError | BroadcastError):
                self._wait_for_news(channel)
                error = channel.failure or error
            if channel.failure is None:
                channel.abort(_told(error))
        self.failure = error
        return error

    def _wait_for_news(self, channel: CpuTpBroadcaster) -> None:
        deadline = time.monotonic() + FAILURE_NEWS_S
        while channel.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)

    # ---- end ---------------------------------------------------------------------------------

    def end(self, close: Callable[[], None]) -> None:
        """Close something. A device that failed fails every call, which hides nothing new."""
        try:
            close()
        except RuntimeError as error:
            if self.failure is None:
                raise
            log.warning("rank %d: while closing after a failure: %s", self.rank, error)

    def stop(self, orderly: Callable[[], None] | None, reason: str | None) -> None:
        """Tell the other ranks that this one ends, unless they know of a failure.

        Args:
            orderly: tells them to stop; None where rank 0 is not there yet, and on peers.
            reason: why it is no orderly end; they then raise with it.
        """
        if self._channel is None or self.failure is not None:
            return
        if reason is not None:
            self._channel.abort(reason)
        elif orderly is not None:
            try:
                orderly()
            except BroadcastError as error:
                # the peers are gone or will learn it from the closed channel
                log.warning("rank 0 could not tell its peers to stop: %s", error)

    def close(self) -> None:
        """One after the other, also where one fails."""
        with ExitStack() as ends:
            if self._channel is not None:
                ends.callback(self._channel.close)
            if self._watcher is not None:  # after the group, which may still wait for its device
                ends.callback(self._watcher.close)
            if self._group is not None and self._owns_group:
                ends.callback(self.end, self._group.close)
            if self._pulse is not None:
                ends.callback(self._pulse.close)


def _told(error: BaseException) -> str:
    """What the others hear of an error."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def resolve_device(config: RuntimeConfig, local_rank: int) -> torch.device:
    """The device of this rank. Raises ConfigError when it does not exist."""
    available = torch.cuda.device_count()
    name = config.device
    if name == "auto":
        name = "cuda" if available else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if local_rank >= available:
        raise ConfigError(
            f"device cuda: local rank {local_rank} needs its own GPU, this host has {available}; "
            "start fewer ranks or use --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _join_by_environment(config: RuntimeConfig, info: RankInfo) -> CpuTpBroadcaster:
    """Join the channel at the address that follows from torchrun's variables."""
    address = channel_address(info) if info.tp_size > 1 else Path(os.devnull)
    return CpuTpBroadcaster.join(
        rank=info.tp_rank,
        world_size=info.tp_size,
        address=address,
        config=_channel_config(config),
    )


def _join_by_group(config: RuntimeConfig, group: TpGroup) -> CpuTpBroadcaster:
    """Join the channel of a host that brings its own process group.

    It has no names to derive an address from, so rank 0 makes a private folder and tells the
    others through the group.
    """
    folder: str | None = None
    try:
        if group.rank == 0 and group.size > 1:
            folder = tempfile.mkdtemp(prefix="tp_runtime-")
        name = group.broadcast_bytes(os.fsencode(folder or os.devnull))
        return CpuTpBroadcaster.join(
            rank=group.rank,
            world_size=group.size,
            address=Path(os.fsdecode(name)) / "channel.sock",
            config=_channel_config(config),
        )
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _channel_config(config: RuntimeConfig) -> BroadcasterConfig:
    return BroadcasterConfig(
        join_timeout_s=config.join_timeout_s,
        timeout_s=config.broadcast_timeout_s,
        wait=cast("WaitMode", config.broadcast_wait),
    )
