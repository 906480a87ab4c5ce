"""Task that a checkpoint is served for, by its files; settings that cannot be followed are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from oarlock.server.llm.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
SIZE = {"hidden_size": 4}
TANH = {"in_features": 4, "out_features": 3, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
SCORE = {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint(architecture, modules, **files)`: its directory. `1_Pooling/config.json` is the file `pooling`."""
    names = {
        "pooling": "1_Pooling/config.json",
        "score": "1_LogitScore/config.json",
        "transformer": "sentence_bert_config.json",
        "prompts": "config_sentence_transformers.json",
        "dense": "2_Dense/config.json",
    }

    def make(architecture="Qwen3ForCausalLM", modules=None, config=None, **files):
        written = {"config.json": {"architectures": [architecture], **(config or {})}}
        if modules is not None:
            written["modules.json"] = modules
        for name, content in (written | {names[name]: content for name, content in files.items()}).items():
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content))
        return tmp_path

    return make


@pytest.fixture
def tokenizer():
    loaded = Tokenizer.load(DEMO)
    yield loaded
    loaded.close()


def test_a_causal_model_generates_unless_its_files_or_the_option_say_otherwise(checkpoint):
    folder = checkpoint()
    assert PoolerConfig.load(folder).task is Task.GENERATE
    pooling = PoolerConfig.load(folder, "pooling")
    assert (pooling.task, pooling.kind, pooling.normalize, pooling.dimensions) == (Task.EMBED, "last", True, None)
    checkpoint(modules=[TRANSFORMER, POOLING], pooling={"pooling_mode_lasttoken": True})
    assert PoolerConfig.load(folder).task is Task.EMBED
    assert PoolerConfig.load(folder, "generate").task is Task.GENERATE


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, "mean"),
    ],
)
def test_the_pooling_module_says_how(checkpoint, pooling, kind):
    for modules, normalize in (([TRANSFORMER, POOLING], False), ([TRANSFORMER, POOLING, NORMALIZE], True)):
        found = PoolerConfig.load(checkpoint("BertModel", modules, pooling=pooling))
        assert (found.task, found.kind, found.normalize, found.source) == (Task.EMBED, kind, normalize, "modules.json")


def test_prompts_lengths_and_dimensions_are_read(checkpoint):
    folder = checkpoint(
        modules=[TRANSFORMER, POOLING, NORMALIZE],
        config={"matryoshka_dimensions": [512, 128]},
        pooling={"pooling_mode": "lasttoken"},
        transformer={"max_seq_length": 128, "do_lower_case": True},
        prompts={"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"},
    )
    found = PoolerConfig.load(folder)
    assert (found.max_len, found.lower_case, found.dimensions) == (128, True, (128, 512))
    assert (found.prompts, found.default_prompt) == ({"query": "Q: ", "document": ""}, "query")
    assert PoolerConfig.load(checkpoint(config={"is_matryoshka": True}), "pooling").dimensions == ()


def test_rerankers_are_known_by_their_answers(checkpoint, tokenizer):
    module = PoolerConfig.load(
        checkpoint(modules=[TRANSFORMER, SCORE], score={"true_token_id": 5, "false_token_id": 6})
    )
    assert (module.task, module.kind, module.label_tokens) == (Task.SCORE, "logits", (6, 5))
    one = PoolerConfig.load(checkpoint(modules=[TRANSFORMER, SCORE], score={"true_token_id": 5}))
    assert one.label_tokens == (5,)
    for found in (
        PoolerConfig.load(checkpoint(), label_tokens=("a", "b")),
        PoolerConfig.load(checkpoint(config={"classifier_from_token": ["a", "b"]})),
    ):
        assert (found.task, found.label_tokens) == (Task.SCORE, ("a", "b"))
        assert found.loaded(tokenizer).label_tokens == tuple(
            tokenizer.encode(word, add_special_tokens=False)[0] for word in ("a", "b")
        )
    with pytest.raises(StartupError, match="tokens"):
        PoolerConfig.load(checkpoint(), label_tokens=("no", "a long answer")).loaded(tokenizer)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"modules": [TRANSFORMER, DENSE, POOLING], "pooling": {}, "dense": TANH, "config": SIZE}, "Dense"),
        ({"modules": [TRANSFORMER, POOLING, NORMALIZE, DENSE], "pooling": {}, "dense": TANH, "config": SIZE}, "Dense"),
        (
            {"modules": [TRANSFORMER, POOLING, DENSE], "pooling": {}, "config": SIZE},
            "2_Dense/config.json, which modules.json lists, is missing",
        ),
        ({"modules": [TRANSFORMER, POOLING, DENSE], "pooling": {}, "dense": TANH}, "no hidden_size"),
        ({"modules": [TRANSFORMER, POOLING, DENSE], "pooling": {}, "dense": {}, "config": SIZE}, "no in_features"),
        (
            {
                "modules": [TRANSFORMER, POOLING, DENSE],
                "pooling": {},
                "dense": TANH | {"in_features": 5},
                "config": SIZE,
            },
            "expects vectors of 5 values, but the previous module returns 4",
        ),
        (
            {
                "modules": [TRANSFORMER, POOLING, DENSE],
                "pooling": {},
                "dense": TANH | {"activation_function": "torch.nn.modules.activation.PReLU"},
                "config": SIZE,
            },
            "activation 'torch.nn.modules.activation.PReLU'",
        ),
        (
            {
                "modules": [TRANSFORMER, POOLING, DENSE],
                "pooling": {},
                "dense": TANH | {"module_input_name": "token_embeddings"},
                "config": SIZE,
            },
            "module_input_name 'token_embeddings'",
        ),
        (
            {
                "modules": [TRANSFORMER, POOLING, DENSE],
                "pooling": {},
                "dense": TANH | {"use_residual": True},
                "config": SIZE,
            },
            "use_residual 'True'",
        ),
        ({"modules": [TRANSFORMER, POOLING]}, "1_Pooling/config.json is missing"),
        ({"modules": [POOLING], "pooling": {}}, "Pooling"),
        ({"modules": []}, "none"),
        ({"modules": {}}, "list"),
        ({"modules": [TRANSFORMER, POOLING], "pooling": {"pooling_mode_max_tokens": True}}, "max"),
        ({"modules": [TRANSFORMER, POOLING], "pooling": {"pooling_mode": ["cls", "mean"]}}, "cls and mean"),
        (
            {
                "modules": [TRANSFORMER, POOLING],
                "pooling": {"include_prompt": False},
                "prompts": {"prompts": {"query": "Q: "}},
            },
            "include_prompt",
        ),
        ({"modules": [TRANSFORMER, POOLING], "pooling": {}, "transformer": {"max_seq_length": "x"}}, "max_seq_length"),
        ({"modules": [TRANSFORMER, POOLING], "pooling": {}, "prompts": {"prompts": [1]}}, "prompts"),
        ({"modules": [TRANSFORMER, POOLING], "pooling": {}, "prompts": {"default_prompt_name": "q"}}, "default_prompt"),
        ({"modules": [TRANSFORMER, SCORE], "score": {}}, "labels"),
        ({"architecture": "BertForSequenceClassification"}, "BertForSequenceClassification"),
        ({"config": {"classifier_from_token": ["a", "b", "c"]}}, "classifier-from-token"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(checkpoint, options, named):
    with pytest.raises(StartupError) as caught:
        PoolerConfig.load(checkpoint(**options))
    assert named in f"{caught.value.cause} {caught.value.fix}"


def test_texts_of_a_model_that_makes_none_are_refused(checkpoint):
    with pytest.raises(StartupError, match="BertModel"):
        PoolerConfig.load(checkpoint("BertModel"), "generate")
    assert PoolerConfig.load(checkpoint("BertModel")).kind == "mean"


ONE_LABEL = {"id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("config", "sigmoid"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
    ],
)
def test_a_cross_encoder_scores_by_its_head(checkpoint, config, sigmoid):
    found = PoolerConfig.load(checkpoint("XLMRobertaForSequenceClassification", config=ONE_LABEL | config))
    assert (found.task, found.kind, found.sigmoid) == (Task.SCORE, "labels", sigmoid)


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("BertForSequenceClassification", {}, "2 labels"),
        ("BertForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "3 labels"),
        ("Qwen3ForSequenceClassification", ONE_LABEL, "only for encoders"),
        ("BertForSequenceClassification", ONE_LABEL | {"sentence_transformers": {"activation_fn": "x.Tanh"}}, "Tanh"),
    ],
)
def test_heads_that_are_no_scores_are_refused(checkpoint, architecture, config, words):
    with pytest.raises(StartupError, match=words):
        PoolerConfig.load(checkpoint(architecture, config=config))


def test_an_encoder_without_other_files_embeds_by_the_mean(checkpoint):
    found = PoolerConfig.load(checkpoint("ModernBertModel"))
    assert (found.task, found.kind, found.normalize) == (Task.EMBED, "mean", True)
    with pytest.raises(StartupError, match="needs a model that generates text"):
        PoolerConfig.load(checkpoint("ModernBertModel"), "generate")


def test_two_texts_need_a_tokenizer_that_says_how_they_stand_side_by_side(checkpoint, tokenizer):
    pooler = PoolerConfig.load(checkpoint("BertForSequenceClassification", config=ONE_LABEL))
    assert tokenizer.pair_marks() is not None
    tokenizer.pair_marks = lambda: None
    with pytest.raises(StartupError, match="reads together"):
        pooler.loaded(tokenizer)
