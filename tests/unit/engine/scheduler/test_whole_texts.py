"""Texts that cannot be divided: which of them a step holds, and what is refused of an encoder."""

from dataclasses import replace

import pytest

from oarlock.engine.errors import RequestError
from oarlock.engine.scheduler.admission import Limits, check
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.types import POOLS, PoolingParams, Request
from tests.unit.engine.engine_fakes import VOCAB, make_config, make_info, make_request
from tests.unit.engine.pooling_fakes import make_pooling_request

ENCODER = Limits(VOCAB, 64, 8, is_encoder=True)


@pytest.mark.parametrize(
    ("limits", "pooling", "field", "words"),
    [
        (ENCODER, PoolingParams("logits", (1,)), "pooling", "has no logits"),
        (ENCODER, PoolingParams("labels"), "pooling", "has no labels"),
        (replace(ENCODER, num_labels=1), PoolingParams("labels", (1,)), "token_ids", "other kinds must have none"),
        (ENCODER, PoolingParams("mean", (), 4), "second_text", "between 0 and 3"),
        (ENCODER, PoolingParams("mean", (), -1), "second_text", "between 0 and 3"),
        (Limits(VOCAB, 64, 8), PoolingParams("mean", (), 2), "second_text", "Only encoders"),
        (Limits(VOCAB, 64, 8), PoolingParams("labels"), "pooling", "has no labels"),
    ],
)
def test_features_that_a_model_lacks_are_refused(
    limits: Limits, pooling: PoolingParams, field: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check(Request(1, (1, 2, 3), POOLS, pooling=pooling), limits)
    assert caught.value.param == field


def test_an_encoder_writes_no_tokens() -> None:
    with pytest.raises(RequestError, match="does not generate tokens"):
        check(make_request(1, (1, 2, 3)), ENCODER)
    check(Request(1, (1, 2, 3), POOLS, pooling=PoolingParams("labels", (), 3)), replace(ENCODER, num_labels=1))


def test_texts_are_scheduled_whole_in_their_order() -> None:
    """Five texts in steps of 40 tokens: none is cut, and none is passed."""
    config = make_config(max_num_batched_tokens=40)
    scheduler = Scheduler(config, replace(make_info(config), whole_texts=True))
    for number, length in enumerate((30, 15, 25, 5, 40), 1):
        scheduler.add(make_pooling_request(number, [3] * length, "mean"), 0.0)
    seen = []
    while scheduler.has_work:
        output = scheduler.schedule(0.0)
        assert output is not None
        seen.append([(item.seq.request_id, item.start, item.num_tokens) for item in output.scheduled])
        for item in output.scheduled:
            scheduler.abort(item.seq.request_id, 0.0)
    assert seen == [[(1, 0, 30)], [(2, 0, 15), (3, 0, 25)], [(4, 0, 5)], [(5, 0, 40)]]
