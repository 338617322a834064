"""KV blocks: how large they are, who holds them, and when they may be used again.

A block is the unit of allocation; a kernel page is what an attention kernel addresses. The page
divides the block, and block b holds the kernel pages b * ratio .. b * ratio + ratio - 1, so only
block numbers travel and every rank expands them alike.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError, PagePoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

KERNEL_PAGE_SIZES = (128, 64, 32, 16)
DUMMY_BLOCK = 0


def resolve_kernel_page(block_size: int, kernel_page_size: int | None = None) -> int:
    """The kernel page in tokens: the one place that decides it.

    An explicit page must divide the block. Unset, it is the block itself where kernels take that
    size, else the largest of 128, 64, 32, 16 that divides the block.

    Raises:
        ConfigError: the sizes do not fit; both are named.
    """
    if block_size < 1:
        raise ConfigError(f"kv_block_size {block_size}: expected a positive number of tokens")
    if kernel_page_size is not None:
        if kernel_page_size not in KERNEL_PAGE_SIZES:
            raise ConfigError(
                f"kernel_page_size {kernel_page_size}: kernels take one of {KERNEL_PAGE_SIZES}"
            )
        if block_size % kernel_page_size:
            raise ConfigError(
                f"kernel_page_size {kernel_page_size} does not divide kv_block_size {block_size}"
            )
        return kernel_page_size
    for page in KERNEL_PAGE_SIZES:
        if block_size % page == 0:
            return page
    raise ConfigError(
        f"kv_block_size {block_size}: no kernel page of {KERNEL_PAGE_SIZES} divides it; "
        "use a multiple of 16"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePoolStatistics:
    """Blocks by state; free + held + deferred = total. The dummy block is not counted."""

    total: int
    free: int
    held: int
    deferred: int
    allocations: int


class PagePool:
    """Block numbers of one KV cache. Block 0 is the dummy that padding writes to.

    A block that is released goes back only when the last step that could read it has completed:
    `release(blocks, after=step)` and later `complete(step)`. Thread-safe, one lock for all of it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"{num_blocks} KV blocks: expected at least 2, one of them is the dummy"
            )
        self._lock = threading.Lock()
        self._total = num_blocks - 1
        # ascending order: neighbours in a sequence tend to be neighbours in memory
        self._free = deque(range(1, num_blocks))
        self._held: set[int] = set()
        self._deferred: deque[tuple[int, tuple[int, ...]]] = deque()
        self._completed = -1
        self._allocations = 0

    @property
    def total(self) -> int:
        """Blocks that requests can hold at most."""
        return self._total

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing taken) when fewer are free."""
        with self._lock:
            if count > len(self._free):
                return None
            blocks = [self._free.popleft() for _ in range(count)]
            self._held.update(blocks)
            self._allocations += count
            return blocks

    def release(self, blocks: Sequence[int], *, after: int) -> None:
        """Give blocks back once step `after` has completed (at once if it has).

        Raises:
            PagePoolError: a block is not held, so it was released twice or never allocated.
        """
        with self._lock:
            strangers = [block for block in blocks if block not in self._held]
            if strangers or len(set(blocks)) != len(blocks):
                raise PagePoolError(
                    f"blocks {strangers or list(blocks)} released, but not held: "
                    "expected each held block exactly once"
                )
            self._held.difference_update(blocks)
            if after <= self._completed:
                self._free.extend(blocks)
            else:
                self._deferred.append((after, tuple(blocks)))

    def complete(self, step: int) -> None:
        """Step `step` and all before it can no longer read anything."""
        with self._lock:
            self._completed = max(self._completed, step)
            if not self._deferred:
                return
            waiting: deque[tuple[int, tuple[int, ...]]] = deque()
            for after, blocks in self._deferred:
                if after <= self._completed:
                    self._free.extend(blocks)
                else:
                    waiting.append((after, blocks))
            self._deferred = waiting

    def check_no_leaks(self) -> None:
        """Raises PagePoolError naming the blocks that nobody gave back."""
        with self._lock:
            if self._held:
                raise PagePoolError(
                    f"{len(self._held)} KV blocks are still held at close: {sorted(self._held)[:8]}"
                )

    def statistics(self) -> PagePoolStatistics:
        with self._lock:
            deferred = sum(len(blocks) for _, blocks in self._deferred)
            return PagePoolStatistics(
                total=self._total,
                free=len(self._free),
                held=len(self._held),
                deferred=deferred,
                allocations=self._allocations,
            )
