"""The block pool: places, counts, prefix hits, eviction order."""

import pytest
from engine_fakes import make_request

from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.sequence import Sequence

SIZE = 4


def sequence(prompt, salt: bytes = b"") -> Sequence:
    return Sequence(make_request(1, prompt, cache_salt=salt), key=(0.0, 1), max_len=1000, arrival_s=0.0)


def pool(num_blocks: int = 9, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, enable_prefix_caching=caching)


def compute(blocks: KVCacheManager, seq: Sequence) -> list[int]:
    """Let `seq` hold and compute all it knows, and publish it."""
    num_cached = blocks.enter(seq, seq.num_tokens, 0)
    blocks.cache_blocks(seq, seq.num_tokens)
    assert num_cached is not None and num_cached % SIZE == 0
    return list(seq.block_ids)


def found(blocks: KVCacheManager, seq: Sequence, max_tokens: int) -> int:
    """Tokens of the cached prefix."""
    return len(blocks.get_computed_blocks(seq, max_tokens)) * SIZE


def test_the_null_block_is_never_handed_out() -> None:
    blocks = pool(5)
    seq = sequence(range(16))
    assert blocks.allocate_slots(seq, 16) == [1, 2, 3, 4]
    assert blocks.allocate_slots(seq, 17) is None
    assert seq.block_ids == [1, 2, 3, 4]
    blocks.audit([seq])
    with pytest.raises(ValueError, match="null block"):
        KVCacheManager(1, SIZE, enable_prefix_caching=True)


def test_growth_takes_only_what_is_missing() -> None:
    blocks = pool()
    seq = sequence(range(5))
    assert len(blocks.allocate_slots(seq, 5) or []) == 2
    assert blocks.allocate_slots(seq, 8) == []
    assert len(blocks.allocate_slots(seq, 9) or []) == 1


def test_a_prefix_is_shared_while_held_and_after() -> None:
    blocks = pool()
    first, second, third = (sequence([*range(8), tail]) for tail in (90, 91, 92))
    held = compute(blocks, first)
    assert blocks.enter(second, 9, 0) == 8
    assert second.block_ids[:2] == held[:2]
    blocks.audit([first, second])
    blocks.free(first)
    blocks.free(second)
    blocks.audit([])
    assert (blocks.num_cached, blocks.num_free, blocks.num_held) == (2, 6, 0)
    assert blocks.enter(third, 9, 0) == 8
    assert third.block_ids[:2] == held[:2]
    blocks.audit([third])


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    blocks = pool()
    compute(blocks, sequence(range(8)))
    assert found(blocks, sequence(range(8)), 8) == 4


def test_a_match_respects_its_limit() -> None:
    blocks = pool()
    compute(blocks, sequence(range(13)))
    assert found(blocks, sequence(range(13)), 7) == 4
    assert found(blocks, sequence(range(13)), 0) == 0


@pytest.mark.parametrize(
    "prompt, salt", [(range(1, 10), b""), (range(9), b"tenant"), ([0, 1, 2, 99, 4, 5, 6, 7, 8], b"")]
)
def test_other_tokens_or_another_salt_share_nothing(prompt, salt) -> None:
    blocks = pool()
    compute(blocks, sequence(range(9)))
    assert found(blocks, sequence(prompt, salt), 9) == 0


def test_equal_tokens_after_another_prefix_are_not_shared() -> None:
    blocks = pool()
    compute(blocks, sequence([9, 9, 9, 9, 4, 5, 6, 7, 8]))
    other = sequence([0, 1, 2, 3, 4, 5, 6, 7, 8])
    compute(blocks, sequence([0, 1, 2, 3, 50]))
    assert found(blocks, other, 9) == 4


def test_each_salt_has_its_own_copy() -> None:
    blocks = pool(13)
    compute(blocks, sequence(range(9), b"one"))
    compute(blocks, sequence(range(9), b"two"))
    first, second = sequence(range(9), b"one"), sequence(range(9), b"two")
    assert blocks.enter(first, 9, 0) == blocks.enter(second, 9, 0) == 8
    assert not set(first.block_ids) & set(second.block_ids)


def test_free_blocks_go_first_then_the_least_recently_freed_prefix() -> None:
    blocks = pool(7)
    old, new = sequence(range(9)), sequence(range(50, 59))
    old_ids, new_ids = compute(blocks, old), compute(blocks, new)
    blocks.free(old)
    blocks.free(new)
    assert (blocks.num_cached, blocks.num_free) == (4, 2)
    taker = sequence(range(200, 216))
    got = blocks.allocate_slots(taker, 16)
    assert got is not None
    # two that meant nothing, then the older prefix, its tail before its root
    assert set(got[:2]) == {old_ids[2], new_ids[2]}
    assert got[2:] == [old_ids[1], old_ids[0]]
    blocks.audit([taker])
    assert found(blocks, sequence(range(9)), 9) == 0
    assert found(blocks, sequence(range(50, 59)), 9) == 8


def test_a_hit_renews_a_prefix() -> None:
    blocks = pool(5)
    first, second = sequence(range(5)), sequence(range(50, 55))
    compute(blocks, first)
    compute(blocks, second)
    blocks.free(first)
    blocks.free(second)
    again = sequence(range(5))
    assert blocks.enter(again, 5, 0) == 4
    blocks.free(again)
    taker = sequence(range(200, 212))
    blocks.allocate_slots(taker, 12)
    assert found(blocks, sequence(range(5)), 5) == 4
    assert found(blocks, sequence(range(50, 55)), 5) == 0


def test_twins_computed_side_by_side_are_published_once() -> None:
    blocks = pool()
    first, second = sequence(range(5)), sequence(range(5))
    for seq in (first, second):
        blocks.allocate_slots(seq, 5)
    blocks.cache_blocks(first, 5)
    blocks.cache_blocks(second, 5)
    blocks.audit([first, second])
    blocks.free(first)
    blocks.free(second)
    blocks.audit([])
    assert blocks.num_cached == 1


class CountedLookups(dict):
    """What is published, and how often it was asked for."""

    count = 0

    def get(self, key, default=None):
        self.count += 1
        return super().get(key, default)

    def __contains__(self, key) -> bool:
        self.count += 1
        return super().__contains__(key)


def blocked_pool() -> tuple[KVCacheManager, CountedLookups, Sequence, list[Sequence]]:
    """A pool in which a long cached prefix cannot be used yet, because others hold what is missing."""
    blocks = pool(30)
    holders = [sequence(range(start, start + 10)) for start in (500, 600, 700)]
    cached = sequence(range(40))
    compute(blocks, cached)
    blocks.free(cached)
    for holder in holders:
        compute(blocks, holder)
    blocks._published = lookups = CountedLookups(blocks._published)
    return blocks, lookups, sequence(range(100)), holders


def test_a_refusal_is_remembered_and_takes_nothing() -> None:
    blocks, lookups, waiting, _ = blocked_pool()
    order = list(blocks._cached)
    assert blocks.enter(waiting, 100, 0) is None
    assert lookups.count == 11  # ten blocks of the prefix, and the one that is missing
    for _ in range(1000):
        assert blocks.enter(waiting, 100, 0) is None
    assert lookups.count == 11 + 1000 and len(waiting.digests) == 11
    assert list(blocks._cached) == order and not waiting.block_ids


def test_a_refused_sequence_enters_as_soon_as_there_is_room() -> None:
    blocks, lookups, waiting, holders = blocked_pool()
    assert blocks.enter(waiting, 100, 2) is None  # 25 blocks and 2 in reserve, of 20
    blocks.free(holders[0])
    blocks.free(holders[1])
    assert blocks.num_available == 26
    assert blocks.enter(waiting, 100, 2) is None and lookups.count == 11 + 1
    assert blocks.enter(waiting, 100, 1) == 40
    blocks.audit([waiting, holders[2]])


def test_a_refused_sequence_enters_when_others_compute_what_it_missed() -> None:
    blocks = pool(16)
    first, second = sequence(range(40)), sequence([*range(36), *range(100, 120)])
    assert blocks.enter(first, 40, 0) == 0
    assert blocks.enter(second, 56, 0) is None  # 14 blocks, of 5
    blocks.cache_blocks(first, 40)
    assert blocks.enter(second, 56, 0) == 36  # nine of them are shared
    blocks.audit([first, second])


def test_forgotten_blocks_are_found_by_nobody() -> None:
    blocks = pool()
    seq = sequence(range(9))
    compute(blocks, seq)
    blocks.forget(seq)
    blocks.audit([seq])
    assert found(blocks, sequence(range(9)), 9) == 0
    blocks.free(seq)
    assert blocks.num_cached == 0
    blocks.audit([])


def test_after_a_reset_nothing_from_before_is_found() -> None:
    blocks = pool(13)
    gone, holder = sequence(range(50, 59)), sequence(range(9))
    compute(blocks, gone)
    held = compute(blocks, holder)
    blocks.free(gone)
    assert (blocks.num_cached, blocks.num_held) == (2, 3)
    assert blocks.reset_cache() == 4  # those in use can be found no more, either
    blocks.audit([holder])
    assert (holder.block_ids, blocks.num_cached, blocks.num_held) == (held, 0, 3)
    assert found(blocks, sequence(range(9)), 9) == found(blocks, sequence(range(50, 59)), 9) == 0
    blocks.free(holder)
    blocks.audit([])
    assert (blocks.num_cached, blocks.num_free, blocks.reset_cache()) == (0, 12, 0)
    compute(blocks, gone)
    assert found(blocks, sequence(range(50, 59)), 9) == 8


def test_without_caching_nothing_is_kept() -> None:
    blocks = pool(caching=False)
    seq = sequence(range(9))
    compute(blocks, seq)
    blocks.free(seq)
    assert (blocks.num_cached, blocks.num_free) == (0, 8)
    assert found(blocks, sequence(range(9)), 9) == 0


@pytest.mark.parametrize("spoil", ["refs", "free", "digest", "held"])
def test_the_audit_notices(spoil: str) -> None:
    blocks = pool()
    seq = sequence(range(9))
    compute(blocks, seq)
    if spoil == "refs":
        blocks._refs[seq.block_ids[0]] += 1
    elif spoil == "free":
        blocks._free[seq.block_ids[0]] = None
    elif spoil == "digest":
        blocks._digest[seq.block_ids[0]] = None
    else:
        seq.block_ids.append(seq.block_ids[0])
    with pytest.raises(AssertionError):
        blocks.audit([seq])
