from __future__ import annotations

import pytest

from tp_runtime.errors import ConfigError, PagePoolError
from tp_runtime.pages import PagePool, resolve_kernel_page


@pytest.mark.parametrize(
    ("block", "page"), [(16, 16), (64, 64), (128, 128), (144, 16), (256, 128), (96, 32), (192, 64)]
)
def test_unset_page_is_the_largest_that_divides(block: int, page: int) -> None:
    assert resolve_kernel_page(block) == page


@pytest.mark.parametrize("block", [8, 24, 136])
def test_a_block_that_no_page_divides_is_refused_naming_it(block: int) -> None:
    with pytest.raises(ConfigError, match=f"kv_block_size {block}"):
        resolve_kernel_page(block)


def test_explicit_page_must_be_known_and_divide() -> None:
    assert resolve_kernel_page(64, 16) == 16
    with pytest.raises(ConfigError, match="kernel_page_size 64 does not divide kv_block_size 96"):
        resolve_kernel_page(96, 64)
    with pytest.raises(ConfigError, match="kernel_page_size 8"):
        resolve_kernel_page(64, 8)
    with pytest.raises(ConfigError, match="positive"):
        resolve_kernel_page(0)


def test_the_dummy_block_is_never_given_out() -> None:
    pool = PagePool(4)
    assert pool.total == 3
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_a_refused_allocation_takes_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.statistics().free == 3


def test_released_blocks_wait_for_the_last_step_that_could_read_them() -> None:
    pool = PagePool(3)
    blocks = pool.allocate(2) or []
    pool.release(blocks, after=7)
    assert pool.statistics().deferred == 2
    pool.complete(6)
    assert pool.allocate(1) is None
    pool.complete(7)
    assert pool.statistics().free == 2
    again = pool.allocate(1) or []
    pool.release(again, after=7)
    assert pool.statistics().free == 2, "step 7 is over, so they are free at once"


def test_a_block_is_released_once() -> None:
    pool = PagePool(3)
    blocks = pool.allocate(1) or []
    pool.release(blocks, after=0)
    with pytest.raises(PagePoolError, match="not held"):
        pool.release(blocks, after=0)
    with pytest.raises(PagePoolError, match="exactly once"):
        pool.release([*(twice := pool.allocate(1) or []), *twice], after=0)


def test_leaks_are_named() -> None:
    pool = PagePool(3)
    pool.check_no_leaks()
    pool.allocate(1)
    with pytest.raises(PagePoolError, match="1 KV blocks are still held"):
        pool.check_no_leaks()


def test_a_cache_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        PagePool(1)
