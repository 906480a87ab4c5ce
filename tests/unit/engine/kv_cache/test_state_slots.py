"""Slots of recurrent state: held, unsaved, checkpoint or free, and never written by a step that reads them."""

from collections.abc import Callable
from random import Random

import pytest

from oarlock.engine.kv_cache.state_slots import NULL_SLOT, HeldSlots, StateSlots


def saved(slots: StateSlots, *names: bytes, **options) -> list[int]:
    """Make checkpoints with these names; return their slots."""
    found = []
    for name in names:
        slot = slots.allocate_save()
        assert slot is not None
        slots.name(slot, name, **options)
        found.append(slot)
    return found


def test_a_sequence_gets_two_slots_and_starts_from_its_checkpoint() -> None:
    slots = StateSlots(8)
    (checkpoint,) = saved(slots, b"a")
    fresh, later = slots.take(None), slots.take(b"a")
    assert fresh is not None and later is not None
    assert fresh.start == NULL_SLOT and later.start == checkpoint
    assert len({*fresh[1:], *later[1:], checkpoint, NULL_SLOT}) == 6
    assert (slots.num_total, slots.num_held, slots.num_checkpoints, slots.num_available) == (7, 4, 1, 2)
    slots.audit([(fresh, False), (later, False)])


def test_the_longest_checkpoint_counts_up_to_a_length() -> None:
    slots = StateSlots(8)
    saved(slots, b"2", b"4")
    chain = [b"1", b"2", b"3", b"4", b"5"]
    assert [slots.longest(chain, count) for count in range(6)] == [0, 0, 2, 2, 4, 4]
    assert slots.has(b"4") and not slots.has(b"3")


def test_the_least_recently_used_checkpoint_is_evicted() -> None:
    slots = StateSlots(6)
    a, b, c = saved(slots, b"a", b"b", b"c")
    held = slots.take(b"a")  # now the most recently used, and the two free slots are gone
    assert held is not None
    slots.give_back(held, has_started=False)
    assert saved(slots, b"d", b"e", b"f") == [held.first, held.second, b]
    assert saved(slots, b"g") == [c] and slots.has(b"a")
    again = slots.allocate_save()
    assert again == a
    slots.name(again, b"d")  # there is one: it counts as used
    assert saved(slots, b"h", b"i") == [a, held.second] and slots.has(b"d")
    slots.audit([])


def test_a_checkpoint_is_not_written_in_the_step_that_reads_it() -> None:
    slots = StateSlots(4)
    (checkpoint,) = saved(slots, b"a")
    slots.begin_step()
    held = slots.take(b"a")
    assert held is not None and held.pinned == checkpoint and slots.num_available == 0
    slots.start(checkpoint)
    assert slots.allocate_save() is None and slots.take(None) is None
    slots.audit([(held, True)])
    slots.begin_step()
    assert slots.allocate_save() == checkpoint and not slots.has(b"a")
    slots.audit([(held, True)])


def test_the_last_slots_are_a_checkpoint_and_another() -> None:
    """The sequence takes its checkpoint over: it reads it in its first step, and writes it in its second."""
    slots = StateSlots(3)
    (checkpoint,) = saved(slots, b"a")
    held = slots.take(b"a")
    assert held is not None and held.start == held.second == checkpoint != held.first
    assert not slots.has(b"a") and slots.num_available == 0
    slots.audit([(held, False)])
    slots.give_back(held, has_started=False)
    assert slots.num_available == 2
    slots.audit([])


def test_a_checkpoint_stays_until_all_have_read_it() -> None:
    """Two sequences, of which one has no tokens in the step in which both were admitted."""
    slots = StateSlots(6)
    (checkpoint,) = saved(slots, b"a")
    first, second = slots.take(b"a"), slots.take(b"a")
    assert first is not None and second is not None
    slots.start(checkpoint)
    slots.begin_step()
    assert slots.num_available == 0
    slots.audit([(first, True), (second, False)])
    slots.give_back(second, has_started=False)
    assert slots.num_available == 3
    slots.audit([(first, True)])


def test_slots_are_refused_without_a_change() -> None:
    slots = StateSlots(4)
    saved(slots, b"a", b"b")
    held = slots.take(b"a")
    assert held is not None and not slots.has(b"b")
    saves = [slots.take(None), slots.take(b"a"), slots.allocate_save()]
    assert saves == [None] * 3 and slots.num_available == 0
    slots.give_back(held, has_started=False)
    assert slots.num_available == 3 and slots.has(b"a")
    slots.audit([])


def test_a_rolling_checkpoint_replaces_the_one_before_unless_it_is_used() -> None:
    slots = StateSlots(8)
    (first,) = saved(slots, b"a", is_rolling=True)
    second = slots.allocate_save(replaces=b"a")
    assert second == first and not slots.has(b"a")
    slots.name(second, b"b", is_rolling=True)
    held = slots.take(b"b")  # by another sequence
    assert held is not None
    third = slots.allocate_save(replaces=b"b")
    assert third not in (None, second)
    slots.give_back(held, has_started=False)
    slots.drop(third)
    fourth = slots.allocate_save(replaces=b"b")
    assert fourth not in (None, second) and slots.has(b"b")
    slots.drop(fourth)
    assert slots.allocate_save(replaces=b"gone") is not None


def test_a_checkpoint_of_the_prompt_is_not_replaced() -> None:
    slots = StateSlots(8)
    (kept,) = saved(slots, b"a")
    assert slots.allocate_save(replaces=b"a") != kept and slots.has(b"a")


def test_forgotten_checkpoints_cannot_be_found_and_are_free_when_read() -> None:
    slots = StateSlots(8)
    saved(slots, b"a", b"b", b"c")
    held = slots.take(b"a")
    assert held is not None
    slots.forget([b"a", b"b", b"unknown"])
    assert not slots.has(b"a") and not slots.has(b"b") and slots.has(b"c")
    slots.audit([(held, False)])
    saved(slots, b"a")  # the same state computed again, in another slot
    slots.start(held.start)
    slots.begin_step()
    assert slots.num_available == 5
    slots.audit([(held, True)])
    assert slots.forget_all() == 2 and slots.num_checkpoints == 0
    slots.audit([(held, True)])


def test_a_pool_too_small_for_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        StateSlots(2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda slots, held: slots.start(held.start),
        lambda slots, held: slots._free.update({held.first: None}),
        lambda slots, held: slots._held.discard(held.second),
        lambda slots, held: slots._evictable.popitem(),
        lambda slots, held: slots._pins.clear(),
        lambda slots, held: slots._unsaved.add(9),
        lambda slots, held: slots._hash_of_slot.popitem(),
        lambda slots, held: slots._rolling.add(held.start),
    ],
)
def test_the_audit_finds_what_is_wrong(spoil: Callable[[StateSlots, HeldSlots], object]) -> None:
    slots = StateSlots(10)
    saved(slots, b"a", b"b")
    held = slots.take(b"a")
    assert held is not None
    slots.audit([(held, False)])
    spoil(slots, held)
    with pytest.raises(AssertionError):
        slots.audit([(held, False)])


def test_random_operations_keep_every_slot_in_one_state() -> None:
    """The content of each slot is modelled: a checkpoint's name always finds the state that was saved under it."""
    draw, slots = Random(4), StateSlots(14)
    running: list[list] = []  # [slots, has_started, hash of its rolling checkpoint]
    unsaved: list[tuple[int, bytes]] = []
    content: dict[int, bytes] = {}
    read_now: set[int] = set()
    for number in range(3000):
        name = b"%d" % draw.randrange(12)
        match draw.randrange(8):
            case 0 | 1:
                held = slots.take(name if slots.has(name) else None)
                if held is not None:
                    assert held.start == NULL_SLOT or content[held.start] == name
                    assert not read_now & {held.first, held.second}, "a slot is read and written"
                    content.update(dict.fromkeys({*held[1:]} - {held.start}, b"of a sequence"))
                    running.append([held, False, None])
            case 2 if running:
                held, has_started, _ = running.pop(draw.randrange(len(running)))
                slots.give_back(held, has_started=has_started)
            case 3:
                slots.begin_step()
                read_now.clear()
            case 4 if running:
                one = draw.choice(running)
                if not one[1] and one[0].pinned != NULL_SLOT:
                    slots.start(one[0].pinned)
                    read_now.add(one[0].pinned)
                one[1] = True
            case 5 if running:
                one = draw.choice(running)
                slot = slots.allocate_save(one[2])
                if slot is not None:
                    assert slot not in read_now, "a slot is read and written"
                    content[slot], one[2] = name, name
                    unsaved.append((slot, name))
            case 6 if unsaved:
                slot, name = unsaved.pop(0)
                slots.name(slot, name, is_rolling=draw.random() < 0.5)
            case 7 if number % 5 == 0:
                slots.forget([name])
        slots.audit([(held, started) for held, started, _ in running])
        assert slots._unsaved == {slot for slot, _ in unsaved}
        assert all(content[slot] == name for name, slot in slots._slot_of_hash.items())
