"""Division of a rank's room among the pools of memory groups."""

import random
from dataclasses import replace

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.memory_spec import SlotsSpec, StatePart
from oarlock.workers.models.registry import describe
from oarlock.workers.platform.dtypes import KVShape
from oarlock.workers.runner.group_sizes import (
    GroupSize,
    GroupSizes,
    with_sequences_that_fit,
)
from oarlock.workers.runner.kv_room import KVRoom
from tests.unit.workers.layers.test_memory_groups import MODELS

MIB = 1 << 20
GEMMA_3_27B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 5376,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "intermediate_size": 21_504, "sliding_window": 1024, "max_position_embeddings": 131_072,
}  # fmt: skip


def config(**changes) -> WorkerConfig:
    settings = {"max_model_len": 4096, "max_num_seqs": 4, "block_size": 16, "dtype": "bfloat16", "device": "cpu"}
    return WorkerConfig("model", **{**settings, "max_num_batched_tokens": 256, **changes})


def pages(layers: int, span: int | None = None, heads: int = 2) -> GroupSize:
    shape = KVShape(layers, heads, 64, 16, 2)
    return GroupSize(layers, shape.bytes_per_block, shape, span)


def slots(num_bytes: int) -> GroupSize:
    return GroupSize(2, num_bytes, None)


def room(available: int) -> KVRoom:
    return KVRoom(available, "there is")


def test_windows_of_gemma_3_27b_take_a_quarter_of_one_group() -> None:
    spec = describe(GEMMA_3_27B)
    assert [(group.memory.span, len(group.layers)) for group in spec.groups] == [(1024, 52), (None, 10)]
    served = config(max_model_len=32_768, max_num_batched_tokens=WorkerConfig("").max_num_batched_tokens)
    groups = GroupSizes.of(served, spec)
    whole = KVShape(62, 16, 128, 16, 2)
    one_group = GroupSizes(served, [GroupSize(62, whole.bytes_per_block, whole)])
    assert groups.bytes_per_token == one_group.bytes_per_token == 2 * 62 * 16 * 128 * 2
    assert groups.bytes_of_sequence(32_768) <= 0.25 * one_group.bytes_of_sequence(32_768)


def test_a_window_needs_its_span_and_one_step() -> None:
    groups = GroupSizes(config(), [pages(1), pages(3, span=100)])
    full, windowed = groups.groups
    assert [groups.blocks_of_sequence(full, length) for length in (1, 16, 17, 4096)] == [1, 1, 2, 256]
    assert [groups.blocks_of_sequence(windowed, length) for length in (16, 300, 4096)] == [1, 19, 24]
    alone = GroupSizes(config(), [windowed])
    assert alone.blocks_of_sequence(windowed, 4096) == 256, "the only group has blocks for whole sequences"


def test_pools_hold_one_long_sequence_and_as_many_short_ones_as_fit() -> None:
    draw = random.Random(0)
    for _ in range(300):
        made = [pages(draw.randint(0, 4), draw.choice([None, 50, 700]), draw.choice([1, 2, 8])) for _ in range(3)]
        made.append(pages(1))
        groups = GroupSizes(config(device=draw.choice(["cpu", "cuda"])), made)
        least = groups.bytes_of_sequence(4096)
        available = least + draw.randrange(20 * least)
        counts = groups.counts_that_fit(room(available))
        spare = sum(group.bytes_per_block for group in made)
        assert groups.bytes_of(counts) + spare <= available, "one page more that the backend keeps"
        assert groups.sequences(counts, 4096) >= 1
        typical = max([4096 // 8, *(one.span for one in made if one.span is not None)])
        held = [(count - 1) / groups.blocks_of_sequence(one, typical) for one, count in zip(made, counts, strict=True)]
        larger = [
            ratio
            for ratio, one, count in zip(held, made, counts, strict=True)
            if count - 1 > groups.blocks_of_sequence(one, 4096) and one.bytes_per_block
        ]
        if groups._config.device == "cuda" and larger:
            assert max(larger) - min(larger) < 1, "pools beyond one long sequence hold equally many short ones"
        with pytest.raises(StartupError, match="Not enough KV memory for one sequence of 4096 tokens"):
            groups.counts_that_fit(room(least - 1))


def test_stages_without_layers_of_a_group_do_not_limit_it() -> None:
    first = GroupSizes(config(device="cuda"), [pages(2), pages(0, span=100)])
    for layers in (1, 40):
        last = GroupSizes(config(device="cuda"), [pages(0), pages(layers, span=100)])
        available = room(4 * max(first.bytes_of_sequence(4096), last.bytes_of_sequence(4096)))
        each = [stage.counts_that_fit(available) for stage in (first, last)]
        agreed = [min(pair) for pair in zip(*each, strict=True)]
        assert agreed == [each[0][0], each[1][1]], "each stage decides on its own group"
        for stage, pool in ((first, first.groups[0]), (last, last.groups[1])):
            spare = available.available - stage.bytes_of(agreed)
            assert 0 <= spare < 3 * pool.bytes_per_block, "and uses all its room"


def test_errors_show_the_arithmetic_of_each_group() -> None:
    groups = GroupSizes(config(), [pages(1), replace(pages(3, span=100)), slots(MIB)])
    need = groups.bytes_of_sequence(4096)
    with pytest.raises(StartupError) as refused:
        groups.counts_that_fit(room(need - 1))
    for words in (
        "(256 + 2 blocks x 16 tokens x 512 bytes = 2 x 1 layers x 2 KV heads x 64 x 2 bytes a token, plus ",
        "24 + 2 blocks of a window of 100 tokens and a step x 16 tokens x 1536 bytes",
        "6 slots x 1.0 MiB of recurrent state in 2 layers",
    ):
        assert words in refused.value.cause
    shorter = int(refused.value.fix.split("--max-model-len to ")[1].split()[0])
    fitting = GroupSizes(config(max_model_len=shorter), groups.groups)
    assert fitting.bytes_of_sequence(shorter) <= need - 1
    fitted = GroupSizes(config(fit_model_len=True, max_num_seqs=1), groups.groups)
    assert 0 < fitted.fitted_length(fitted.counts_that_fit(room(need + MIB))) <= 4096


def test_slots_are_two_for_each_sequence_and_as_many_checkpoints_as_fit() -> None:
    groups = GroupSizes(config(), [pages(1), slots(MIB)])
    of_pages = groups.bytes_of_sequence(4096) - 6 * MIB
    assert groups.counts_that_fit(room(of_pages + 100 * MIB))[1] == 1 + 4 * 4
    assert groups.counts_that_fit(room(of_pages + 12 * MIB))[1] == 11
    with pytest.raises(StartupError, match=r"state of 4 sequences: .*Lower --max-num-seqs to 2 or less") as refused:
        groups.counts_that_fit(room(of_pages + 7 * MIB))
    assert refused.value.exit_code == 4
    (only,) = GroupSizes(config(), [slots(MIB)]).counts_that_fit(room(40 * MIB))
    assert only == 17
    assert GroupSizes(config(), [slots(MIB)]).joint_blocks([only]) == 4 * 256 + 1
    assert groups.sequences([1025, 17], 4096) == 4 and groups.sequences([1025, 5], 16) == 2
    assert groups.given_counts(9) == [9, 17]


def test_slots_leave_room_for_the_pages_of_one_long_sequence() -> None:
    asked = config(max_num_seqs=64)
    made = [pages(1), slots(pages(1).bytes_per_block)]
    least = GroupSizes(asked, made).bytes_of_sequence(4096)
    found = []
    for available in range(least, 2 * least, least // 100):
        found.append(GroupSizes(asked, made).sequences_with_slots(room(available)))
        lowered = GroupSizes(asked.with_(max_num_seqs=found[-1]), made)
        assert lowered.counts_that_fit(room(available))[1] > 4 * found[-1], "all have slots for checkpoints"
    assert found == sorted(found) and found[0] == 1 and found[-1] == 64
    assert GroupSizes(asked, made).sequences_with_slots(room(least - 1)) > 1, "fewer sequences would not help"
    fitted = GroupSizes(asked.with_(fit_model_len=True), made)
    assert fitted.sequences_with_slots(room(least)) > 1, "a shorter sequence leaves more"


def test_the_number_of_sequences_is_lowered_to_the_states_that_fit() -> None:
    spec = MODELS["pages and states"]
    each = sum(len(group.layers) for group in spec.groups if isinstance(group.memory, SlotsSpec)) * 48 * 4
    asked = config(max_num_seqs=64)
    lowered = with_sequences_that_fit(asked, spec, room(2 * each * (4 * 10 + 2)))
    assert lowered.max_num_seqs == 10 and with_sequences_that_fit(asked, spec, room(1 << 40)) is asked
    assert with_sequences_that_fit(asked, spec, room(1)).max_num_seqs == 1
    assert with_sequences_that_fit(asked, describe(GEMMA_3_27B), room(1)) is asked
    part = StatePart("state", 8, (16,), copied_rows=2, is_float32=False)
    assert part.bytes_of_rank(4, "bfloat16") == (2 + 2) * 16 * 2


def test_as_many_sequences_start_as_leave_room_for_the_longest() -> None:
    """The states of the sequences that are left must never take the room of the longest sequence that would fit."""
    spec, longest = MODELS["pages and states"], 4096
    for asked in (4, 64):
        least = GroupSizes.of(config(max_num_seqs=1), spec).bytes_of_sequence(longest)
        for available in range(least, 3 * least, least // 40):
            lowered = with_sequences_that_fit(config(max_num_seqs=asked), spec, room(available))
            counts = GroupSizes.of(lowered, spec).counts_that_fit(room(available))
            assert GroupSizes.of(lowered, spec).sequences(counts, longest) >= 1
