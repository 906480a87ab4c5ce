"""The memory of sequences in one group: block states, reference counts, prefix hits, eviction order."""

import pytest

from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.workers.config import GroupInfo
from tests.unit.engine.engine_fakes import make_request

SIZE = 4


def sequence(prompt, salt: bytes = b"") -> Sequence:
    return Sequence(make_request(1, prompt, cache_salt=salt), key=(0.0, 1), max_len=1000, arrival_s=0.0)


def pool(num_blocks: int = 9, caching: bool = True) -> SequenceMemory:
    return SequenceMemory({0: GroupInfo(num_blocks, 0)}, SIZE, enable_prefix_caching=caching)


def compute(memory: SequenceMemory, seq: Sequence) -> list[int]:
    """Allocate all blocks of `seq` and put the full ones into the prefix cache."""
    num_cached = memory.allocate(seq, seq.num_tokens, 0)
    memory.cache_blocks(seq, seq.num_tokens)
    assert num_cached is not None and num_cached % SIZE == 0
    return list(seq.block_ids)


def found(memory: SequenceMemory, seq: Sequence, max_tokens: int) -> int:
    """Tokens of the cached prefix."""
    return len(memory.find_prefix(seq, max_tokens)[0]) * SIZE


def grown(memory: SequenceMemory, seq: Sequence, num_tokens: int) -> list[int]:
    """Blocks that `seq` gets for `num_tokens` tokens in all."""
    entries = []
    assert memory.grow(seq, num_tokens, entries)
    return [block for _, _, _, block in entries]


def test_the_null_block_is_never_allocated() -> None:
    memory = pool(5)
    seq = sequence(range(16))
    assert grown(memory, seq, 16) == [1, 2, 3, 4]
    assert not memory.grow(seq, 17, [])
    assert seq.block_ids == [1, 2, 3, 4]
    memory.audit([seq])
    with pytest.raises(ValueError, match="null block"):
        pool(1)


def test_allocating_slots_takes_only_missing_blocks() -> None:
    memory = pool()
    seq = sequence(range(5))
    assert len(grown(memory, seq, 5)) == 2
    assert grown(memory, seq, 8) == []
    assert len(grown(memory, seq, 9)) == 1


def test_a_prefix_is_shared_while_held_and_after() -> None:
    memory = pool()
    first, second, third = (sequence([*range(8), tail]) for tail in (90, 91, 92))
    held = compute(memory, first)
    assert memory.allocate(second, 9, 0) == 8
    assert second.block_ids[:2] == held[:2]
    memory.audit([first, second])
    memory.free(first)
    memory.free(second)
    memory.audit([])
    assert (memory.num_cached, memory.num_free, memory.num_held) == (2, 6, 0)
    assert memory.allocate(third, 9, 0) == 8
    assert third.block_ids[:2] == held[:2]
    memory.audit([third])


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    memory = pool()
    compute(memory, sequence(range(8)))
    assert found(memory, sequence(range(8)), 8) == 4


def test_a_prefix_hit_respects_its_limit() -> None:
    memory = pool()
    compute(memory, sequence(range(13)))
    assert found(memory, sequence(range(13)), 7) == 4
    assert found(memory, sequence(range(13)), 0) == 0


@pytest.mark.parametrize(
    "prompt, salt", [(range(1, 10), b""), (range(9), b"tenant"), ([0, 1, 2, 99, 4, 5, 6, 7, 8], b"")]
)
def test_other_tokens_or_another_salt_share_nothing(prompt, salt) -> None:
    memory = pool()
    compute(memory, sequence(range(9)))
    assert found(memory, sequence(prompt, salt), 9) == 0


def test_equal_tokens_after_another_prefix_are_not_shared() -> None:
    memory = pool()
    compute(memory, sequence([9, 9, 9, 9, 4, 5, 6, 7, 8]))
    other = sequence([0, 1, 2, 3, 4, 5, 6, 7, 8])
    compute(memory, sequence([0, 1, 2, 3, 50]))
    assert found(memory, other, 9) == 4


def test_each_salt_has_its_own_copy() -> None:
    memory = pool(13)
    compute(memory, sequence(range(9), b"one"))
    compute(memory, sequence(range(9), b"two"))
    first, second = sequence(range(9), b"one"), sequence(range(9), b"two")
    assert memory.allocate(first, 9, 0) == memory.allocate(second, 9, 0) == 8
    assert not set(first.block_ids) & set(second.block_ids)


def test_free_blocks_go_first_then_the_least_recently_freed_prefix() -> None:
    memory = pool(7)
    old, new = sequence(range(9)), sequence(range(50, 59))
    old_ids, new_ids = compute(memory, old), compute(memory, new)
    memory.free(old)
    memory.free(new)
    assert (memory.num_cached, memory.num_free) == (4, 2)
    taker = sequence(range(200, 216))
    got = grown(memory, taker, 16)
    # the two free ones, then the older prefix, its last block first
    assert set(got[:2]) == {old_ids[2], new_ids[2]}
    assert got[2:] == [old_ids[1], old_ids[0]]
    memory.audit([taker])
    assert found(memory, sequence(range(9)), 9) == 0
    assert found(memory, sequence(range(50, 59)), 9) == 8


def test_a_hit_makes_a_prefix_recently_used() -> None:
    memory = pool(5)
    first, second = sequence(range(5)), sequence(range(50, 55))
    compute(memory, first)
    compute(memory, second)
    memory.free(first)
    memory.free(second)
    again = sequence(range(5))
    assert memory.allocate(again, 5, 0) == 4
    memory.free(again)
    taker = sequence(range(200, 212))
    memory.grow(taker, 12, [])
    assert found(memory, sequence(range(5)), 5) == 4
    assert found(memory, sequence(range(50, 55)), 5) == 0


def test_equal_blocks_computed_side_by_side_are_cached_once() -> None:
    memory = pool()
    first, second = sequence(range(5)), sequence(range(5))
    for seq in (first, second):
        memory.grow(seq, 5, [])
    memory.cache_blocks(first, 5)
    memory.cache_blocks(second, 5)
    memory.audit([first, second])
    memory.free(first)
    memory.free(second)
    memory.audit([])
    assert memory.num_cached == 1


class CountedLookups(dict):
    """Counts its lookups."""

    count = 0

    def get(self, key, default=None):
        self.count += 1
        return super().get(key, default)

    def __contains__(self, key) -> bool:
        self.count += 1
        return super().__contains__(key)


def blocked_pool() -> tuple[SequenceMemory, CountedLookups, Sequence, list[Sequence]]:
    """A pool in which a long cached prefix cannot be used yet, because others hold what is missing."""
    memory = pool(30)
    holders = [sequence(range(start, start + 10)) for start in (500, 600, 700)]
    cached = sequence(range(40))
    compute(memory, cached)
    memory.free(cached)
    for holder in holders:
        compute(memory, holder)
    memory.leader.pool.block_of_hash = lookups = CountedLookups(memory.leader.pool.block_of_hash)
    return memory, lookups, sequence(range(100)), holders


def test_a_refusal_is_remembered_and_takes_nothing() -> None:
    memory, lookups, waiting, _ = blocked_pool()
    order = list(memory.leader.pool.cached)
    assert memory.allocate(waiting, 100, 0) is None
    assert lookups.count == 11  # ten blocks of the prefix, and the one that is missing
    for _ in range(1000):
        assert memory.allocate(waiting, 100, 0) is None
    assert lookups.count == 11 + 1000 and len(waiting.block_hashes) == 11
    assert list(memory.leader.pool.cached) == order and not waiting.block_ids


def test_a_refused_sequence_gets_blocks_as_soon_as_enough_are_free() -> None:
    memory, lookups, waiting, holders = blocked_pool()
    assert memory.allocate(waiting, 100, 2) is None  # 25 blocks and 2 in reserve, of 20
    memory.free(holders[0])
    memory.free(holders[1])
    assert memory.num_available == 26
    assert memory.allocate(waiting, 100, 2) is None and lookups.count == 11 + 1
    assert memory.allocate(waiting, 100, 1) == 40
    memory.audit([waiting, holders[2]])


def test_a_refused_sequence_gets_blocks_when_others_compute_its_prefix() -> None:
    memory = pool(16)
    first, second = sequence(range(40)), sequence([*range(36), *range(100, 120)])
    assert memory.allocate(first, 40, 0) == 0
    assert memory.allocate(second, 56, 0) is None  # 14 blocks, of 5
    memory.cache_blocks(first, 40)
    assert memory.allocate(second, 56, 0) == 36  # nine of them are shared
    memory.audit([first, second])


def test_evicted_blocks_are_not_found() -> None:
    memory = pool()
    seq = sequence(range(9))
    compute(memory, seq)
    memory.evict_blocks(seq)
    memory.audit([seq])
    assert found(memory, sequence(range(9)), 9) == 0
    memory.free(seq)
    assert memory.num_cached == 0
    memory.audit([])


def test_after_a_reset_nothing_from_before_is_found() -> None:
    memory = pool(13)
    gone, holder = sequence(range(50, 59)), sequence(range(9))
    compute(memory, gone)
    held = compute(memory, holder)
    memory.free(gone)
    assert (memory.num_cached, memory.num_held) == (2, 3)
    assert memory.reset_prefix_cache() == 4  # those in use are not found any more, either
    memory.audit([holder])
    assert (holder.block_ids, memory.num_cached, memory.num_held) == (held, 0, 3)
    assert found(memory, sequence(range(9)), 9) == found(memory, sequence(range(50, 59)), 9) == 0
    memory.free(holder)
    memory.audit([])
    assert (memory.num_cached, memory.num_free, memory.reset_prefix_cache()) == (0, 12, 0)
    compute(memory, gone)
    assert found(memory, sequence(range(50, 59)), 9) == 8


def test_without_caching_nothing_is_kept() -> None:
    memory = pool(caching=False)
    seq = sequence(range(9))
    compute(memory, seq)
    memory.free(seq)
    assert (memory.num_cached, memory.num_free) == (0, 8)
    assert found(memory, sequence(range(9)), 9) == 0


@pytest.mark.parametrize("fault", ["refs", "free", "hash", "held"])
def test_the_audit_finds(fault: str) -> None:
    memory = pool()
    seq = sequence(range(9))
    compute(memory, seq)
    if fault == "refs":
        memory.leader.pool.refs[seq.block_ids[0]] += 1
    elif fault == "free":
        memory.leader.pool.free[seq.block_ids[0]] = None
    elif fault == "hash":
        memory.leader.pool.hash_of_block[seq.block_ids[0]] = None
    else:
        seq.block_ids.append(seq.block_ids[0])
    with pytest.raises(AssertionError):
        memory.audit([seq])
