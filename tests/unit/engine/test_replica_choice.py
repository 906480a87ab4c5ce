"""The choice of a replica: prefixes are followed, but never beyond the largest_weight on loads."""

import random

import pytest

from oarlock.engine.replicas import REQUEST_WEIGHT_TOKENS, SLACK_TOKENS, Load, choose, largest_weight


@pytest.mark.parametrize(
    ("loads", "cached", "chosen", "why"),
    [
        ([Load(), Load()], [0, 0], 0, "all equal: the first"),
        ([Load(num_chosen=1), Load()], [0, 0], 1, "equally busy: the one chosen least often"),
        ([Load(1), Load()], [0, 0], 1, "no prefix: the least busy"),
        ([Load(1), Load()], [32, 0], 0, "a prefix counts more than a little load"),
        ([Load(1), Load()], [32, 64], 1, "the longest prefix"),
        ([Load(1, num_chosen=9), Load(2)], [64, 64], 0, "equal prefixes: the least busy"),
        ([Load(0, SLACK_TOKENS), Load()], [32, 0], 0, "at the largest_weight"),
        ([Load(0, SLACK_TOKENS + 1), Load()], [32, 0], 1, "beyond the largest_weight"),
        ([Load(100), Load(80)], [32, 0], 0, "a quarter more than the least"),
        ([Load(101), Load(80)], [32, 0], 1, "more than a quarter more"),
        ([None, Load(500)], [320, 0], 1, "one that takes no requests is not chosen"),
        ([Load(4, max_open=4), Load(9)], [320, 0], 1, "one whose queue is full is passed by"),
        ([Load(0, 64, max_waiting_tokens=64), Load(9)], [320, 0], 1, "full of tokens"),
        ([Load(4, max_open=4), Load(4, max_open=4)], [0, 320], 1, "all are full: one of them refuses it"),
    ],
)
def test_the_longest_prefix_within_the_bound(
    loads: list[Load | None], cached: list[int], chosen: int, why: str
) -> None:
    assert choose(loads, cached) == chosen, why


def test_nobody_to_choose_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        choose([None, None], [0, 0])


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_no_replica_is_chosen_beyond_the_bound_whatever_is_cached(replicas: int) -> None:
    draw = random.Random(replicas)
    loads = [Load() for _ in range(replicas)]
    running: list[tuple[int, int]] = []
    for _ in range(3000):
        if running and draw.random() < 0.4:
            number, tokens = running.pop(draw.randrange(len(running)))
            loads[number].num_open -= 1
            loads[number].num_waiting_tokens -= tokens
            continue
        cached = [draw.choice((0, 32, 4096)) for _ in loads]
        before = min(load.weight for load in loads)
        number = choose(loads, cached)
        assert loads[number].weight <= largest_weight(before)
        within = [at for at, load in enumerate(loads) if load.weight <= largest_weight(before)]
        assert cached[number] == max(cached[at] for at in within), "the longest of those within the largest_weight"
        tokens = draw.choice((8, 300, 6000))
        loads[number].num_open += 1
        loads[number].num_waiting_tokens += tokens
        loads[number].num_chosen += 1
        running.append((number, tokens))


def test_without_prefixes_all_replicas_are_used_equally() -> None:
    loads = [Load() for _ in range(4)]
    for _ in range(40):
        chosen = loads[choose(loads, [0] * 4)]
        chosen.num_chosen += 1
    assert [load.num_chosen for load in loads] == [10] * 4


def test_conversations_stay_where_their_beginnings_are() -> None:
    """Eight groups with prompts of 2048 shared tokens, four requests open at a time: each group's beginning is
    computed on one replica, as its first request went there."""
    loads = [Load(), Load()]
    holds: list[set[int]] = [set(), set()]
    hits = 0
    open_at: list[int] = []
    for number in range(400):
        group = number * 5 % 8
        if len(open_at) == 4:
            loads[open_at.pop(0)].num_open -= 1
        chosen = choose(loads, [2048 * (group in held) for held in holds])
        hits += group in holds[chosen]
        holds[chosen].add(group)
        loads[chosen].num_open += 1
        loads[chosen].num_chosen += 1
        open_at.append(chosen)
    assert hits == 400 - 8 and sorted(map(len, holds)) == [4, 4]
    assert 4 * REQUEST_WEIGHT_TOKENS <= SLACK_TOKENS, "so few requests never go beyond the largest_weight"


def test_a_beginning_that_all_share_is_soon_on_both_and_then_the_least_busy_is_chosen() -> None:
    loads, holds, open_at = [Load(), Load()], [False, False], list[int]()
    for _ in range(100):
        if len(open_at) == 12:
            loads[open_at.pop(0)].num_open -= 1
        chosen = choose(loads, [2048 * held for held in holds])
        holds[chosen] = True
        loads[chosen].num_open += 1
        loads[chosen].num_chosen += 1
        open_at.append(chosen)
    assert holds == [True, True] and [load.num_open for load in loads] == [6, 6]
