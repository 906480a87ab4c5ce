"""The KV cache manager: block states, reference counts, prefix hits, eviction order."""

import pytest

from oarlock.engine.kv_cache.manager import KVCacheManager
from oarlock.engine.scheduler.sequence import Sequence
from tests.unit.engine.engine_fakes import make_request

SIZE = 4


def sequence(prompt, salt: bytes = b"") -> Sequence:
    return Sequence(make_request(1, prompt, cache_salt=salt), key=(0.0, 1), max_len=1000, arrival_s=0.0)


def pool(num_blocks: int = 9, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, enable_prefix_caching=caching)


def compute(manager: KVCacheManager, seq: Sequence) -> list[int]:
    """Allocate all blocks of `seq` and put the full ones into the prefix cache."""
    num_cached = manager.allocate(seq, seq.num_tokens, 0)
    manager.cache_blocks(seq, seq.num_tokens)
    assert num_cached is not None and num_cached % SIZE == 0
    return list(seq.block_ids)


def found(manager: KVCacheManager, seq: Sequence, max_tokens: int) -> int:
    """Tokens of the cached prefix."""
    return len(manager.get_computed_blocks(seq, max_tokens)) * SIZE


def test_the_null_block_is_never_allocated() -> None:
    manager = pool(5)
    seq = sequence(range(16))
    assert manager.allocate_slots(seq, 16) == [1, 2, 3, 4]
    assert manager.allocate_slots(seq, 17) is None
    assert seq.block_ids == [1, 2, 3, 4]
    manager.audit([seq])
    with pytest.raises(ValueError, match="null block"):
        KVCacheManager(1, SIZE, enable_prefix_caching=True)


def test_allocating_slots_takes_only_missing_blocks() -> None:
    manager = pool()
    seq = sequence(range(5))
    assert len(manager.allocate_slots(seq, 5) or []) == 2
    assert manager.allocate_slots(seq, 8) == []
    assert len(manager.allocate_slots(seq, 9) or []) == 1


def test_a_prefix_is_shared_while_held_and_after() -> None:
    manager = pool()
    first, second, third = (sequence([*range(8), tail]) for tail in (90, 91, 92))
    held = compute(manager, first)
    assert manager.allocate(second, 9, 0) == 8
    assert second.block_ids[:2] == held[:2]
    manager.audit([first, second])
    manager.free(first)
    manager.free(second)
    manager.audit([])
    assert (manager.num_cached, manager.num_free, manager.num_held) == (2, 6, 0)
    assert manager.allocate(third, 9, 0) == 8
    assert third.block_ids[:2] == held[:2]
    manager.audit([third])


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    manager = pool()
    compute(manager, sequence(range(8)))
    assert found(manager, sequence(range(8)), 8) == 4


def test_a_prefix_hit_respects_its_limit() -> None:
    manager = pool()
    compute(manager, sequence(range(13)))
    assert found(manager, sequence(range(13)), 7) == 4
    assert found(manager, sequence(range(13)), 0) == 0


@pytest.mark.parametrize(
    "prompt, salt", [(range(1, 10), b""), (range(9), b"tenant"), ([0, 1, 2, 99, 4, 5, 6, 7, 8], b"")]
)
def test_other_tokens_or_another_salt_share_nothing(prompt, salt) -> None:
    manager = pool()
    compute(manager, sequence(range(9)))
    assert found(manager, sequence(prompt, salt), 9) == 0


def test_equal_tokens_after_another_prefix_are_not_shared() -> None:
    manager = pool()
    compute(manager, sequence([9, 9, 9, 9, 4, 5, 6, 7, 8]))
    other = sequence([0, 1, 2, 3, 4, 5, 6, 7, 8])
    compute(manager, sequence([0, 1, 2, 3, 50]))
    assert found(manager, other, 9) == 4


def test_each_salt_has_its_own_copy() -> None:
    manager = pool(13)
    compute(manager, sequence(range(9), b"one"))
    compute(manager, sequence(range(9), b"two"))
    first, second = sequence(range(9), b"one"), sequence(range(9), b"two")
    assert manager.allocate(first, 9, 0) == manager.allocate(second, 9, 0) == 8
    assert not set(first.block_ids) & set(second.block_ids)


def test_free_blocks_go_first_then_the_least_recently_freed_prefix() -> None:
    manager = pool(7)
    old, new = sequence(range(9)), sequence(range(50, 59))
    old_ids, new_ids = compute(manager, old), compute(manager, new)
    manager.free(old)
    manager.free(new)
    assert (manager.num_cached, manager.num_free) == (4, 2)
    taker = sequence(range(200, 216))
    got = manager.allocate_slots(taker, 16)
    assert got is not None
    # the two free ones, then the older prefix, its last block first
    assert set(got[:2]) == {old_ids[2], new_ids[2]}
    assert got[2:] == [old_ids[1], old_ids[0]]
    manager.audit([taker])
    assert found(manager, sequence(range(9)), 9) == 0
    assert found(manager, sequence(range(50, 59)), 9) == 8


def test_a_hit_makes_a_prefix_recently_used() -> None:
    manager = pool(5)
    first, second = sequence(range(5)), sequence(range(50, 55))
    compute(manager, first)
    compute(manager, second)
    manager.free(first)
    manager.free(second)
    again = sequence(range(5))
    assert manager.allocate(again, 5, 0) == 4
    manager.free(again)
    taker = sequence(range(200, 212))
    manager.allocate_slots(taker, 12)
    assert found(manager, sequence(range(5)), 5) == 4
    assert found(manager, sequence(range(50, 55)), 5) == 0


def test_equal_blocks_computed_side_by_side_are_cached_once() -> None:
    manager = pool()
    first, second = sequence(range(5)), sequence(range(5))
    for seq in (first, second):
        manager.allocate_slots(seq, 5)
    manager.cache_blocks(first, 5)
    manager.cache_blocks(second, 5)
    manager.audit([first, second])
    manager.free(first)
    manager.free(second)
    manager.audit([])
    assert manager.num_cached == 1


class CountedLookups(dict):
    """Counts its lookups."""

    count = 0

    def get(self, key, default=None):
        self.count += 1
        return super().get(key, default)

    def __contains__(self, key) -> bool:
        self.count += 1
        return super().__contains__(key)


def blocked_pool() -> tuple[KVCacheManager, CountedLookups, Sequence, list[Sequence]]:
    """A pool in which a long cached prefix cannot be used yet, because others hold what is missing."""
    manager = pool(30)
    holders = [sequence(range(start, start + 10)) for start in (500, 600, 700)]
    cached = sequence(range(40))
    compute(manager, cached)
    manager.free(cached)
    for holder in holders:
        compute(manager, holder)
    manager._block_of_hash = lookups = CountedLookups(manager._block_of_hash)
    return manager, lookups, sequence(range(100)), holders


def test_a_refusal_is_remembered_and_takes_nothing() -> None:
    manager, lookups, waiting, _ = blocked_pool()
    order = list(manager._cached)
    assert manager.allocate(waiting, 100, 0) is None
    assert lookups.count == 11  # ten blocks of the prefix, and the one that is missing
    for _ in range(1000):
        assert manager.allocate(waiting, 100, 0) is None
    assert lookups.count == 11 + 1000 and len(waiting.block_hashes) == 11
    assert list(manager._cached) == order and not waiting.block_ids


def test_a_refused_sequence_gets_blocks_as_soon_as_enough_are_free() -> None:
    manager, lookups, waiting, holders = blocked_pool()
    assert manager.allocate(waiting, 100, 2) is None  # 25 blocks and 2 in reserve, of 20
    manager.free(holders[0])
    manager.free(holders[1])
    assert manager.num_available == 26
    assert manager.allocate(waiting, 100, 2) is None and lookups.count == 11 + 1
    assert manager.allocate(waiting, 100, 1) == 40
    manager.audit([waiting, holders[2]])


def test_a_refused_sequence_gets_blocks_when_others_compute_its_prefix() -> None:
    manager = pool(16)
    first, second = sequence(range(40)), sequence([*range(36), *range(100, 120)])
    assert manager.allocate(first, 40, 0) == 0
    assert manager.allocate(second, 56, 0) is None  # 14 blocks, of 5
    manager.cache_blocks(first, 40)
    assert manager.allocate(second, 56, 0) == 36  # nine of them are shared
    manager.audit([first, second])


def test_evicted_blocks_are_not_found() -> None:
    manager = pool()
    seq = sequence(range(9))
    compute(manager, seq)
    manager.evict_blocks(seq)
    manager.audit([seq])
    assert found(manager, sequence(range(9)), 9) == 0
    manager.free(seq)
    assert manager.num_cached == 0
    manager.audit([])


def test_after_a_reset_nothing_from_before_is_found() -> None:
    manager = pool(13)
    gone, holder = sequence(range(50, 59)), sequence(range(9))
    compute(manager, gone)
    held = compute(manager, holder)
    manager.free(gone)
    assert (manager.num_cached, manager.num_held) == (2, 3)
    assert manager.reset_prefix_cache() == 4  # those in use are not found any more, either
    manager.audit([holder])
    assert (holder.block_ids, manager.num_cached, manager.num_held) == (held, 0, 3)
    assert found(manager, sequence(range(9)), 9) == found(manager, sequence(range(50, 59)), 9) == 0
    manager.free(holder)
    manager.audit([])
    assert (manager.num_cached, manager.num_free, manager.reset_prefix_cache()) == (0, 12, 0)
    compute(manager, gone)
    assert found(manager, sequence(range(50, 59)), 9) == 8


def test_without_caching_nothing_is_kept() -> None:
    manager = pool(caching=False)
    seq = sequence(range(9))
    compute(manager, seq)
    manager.free(seq)
    assert (manager.num_cached, manager.num_free) == (0, 8)
    assert found(manager, sequence(range(9)), 9) == 0


@pytest.mark.parametrize("fault", ["refs", "free", "hash", "held"])
def test_the_audit_finds(fault: str) -> None:
    manager = pool()
    seq = sequence(range(9))
    compute(manager, seq)
    if fault == "refs":
        manager._refs[seq.block_ids[0]] += 1
    elif fault == "free":
        manager._free[seq.block_ids[0]] = None
    elif fault == "hash":
        manager._hash_of_block[seq.block_ids[0]] = None
    else:
        seq.block_ids.append(seq.block_ids[0])
    with pytest.raises(AssertionError):
        manager.audit([seq])
