"""Tiny seeded encoders of every family, written by transformers itself, and its results with them.

from tests.golden.tiny_encoders import make_encoder

path = make_encoder(tmp_path, "bert-score", tokenizer=True)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

# Odd on purpose: no size is another's.
_SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_MODERN = {"local_attention": 16, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
# name -> model_type, settings, whether it has a head
ENCODERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "bert": ("bert", {}, False),
    "bert-tanh": ("bert", {"hidden_act": "gelu_new"}, False),
    "bert-score": ("bert", {}, True),
    "roberta": ("roberta", {"type_vocab_size": 1}, False),
    "xlm-roberta-score": ("xlm-roberta", {"type_vocab_size": 1}, True),
    "modernbert": ("modernbert", _MODERN | {"max_position_embeddings": 2048}, False),
    "modernbert-biased": (
        "modernbert",
        _MODERN | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 6},
        False,
    ),
    "modernbert-score": ("modernbert", _MODERN | {"classifier_pooling": "mean", "classifier_bias": True}, True),
}
SCORING = tuple(name for name, (_, _, scores) in ENCODERS.items() if scores)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def make_encoder(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, tokenizer: bool = False, **overrides: Any
) -> Path:
    """Write `folder/name`. `overrides`: of its settings. With `tokenizer`, one of single letters is beside it."""
    model_type, settings, scores = ENCODERS[name]
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **settings, "num_labels": 1, **overrides})
    kind = AutoModelForSequenceClassification if scores else AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = kind.from_config(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                is_norm = parameter_name.lower().endswith("norm.weight")
                is_vector = parameter.dim() == 1
                parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.1 if is_vector else 0.15)
    model.to(dtype).save_pretrained(folder / name)
    if tokenizer:
        write_letter_tokenizer(folder / name, has_types=model_type == "bert")
    return folder / name


def load_encoder(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load transformers' model."""
    scores = any(path.name == name for name in SCORING)
    kind = AutoModelForSequenceClassification if scores else AutoModel
    return kind.from_pretrained(path, dtype=dtype).eval()


def hidden_of(model: PreTrainedModel, ids: Sequence[int], second: int = 0) -> Tensor:
    """float64 [n, hidden] of one text, whose second part begins at `second` where there is one."""
    base = model.base_model
    with torch.inference_mode():
        return base(**_inputs(model, ids, second)).last_hidden_state[0].double()


def score_of(model: PreTrainedModel, ids: Sequence[int], second: int = 0) -> float:
    """Score that the classification head gives a text."""
    with torch.inference_mode():
        return float(model(**_inputs(model, ids, second)).logits[0, 0])


def _inputs(model: PreTrainedModel, ids: Sequence[int], second: int) -> dict[str, Tensor]:
    found = {"input_ids": torch.tensor([list(ids)]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    if second:
        found["token_type_ids"] = torch.tensor([[0] * second + [1] * (len(ids) - second)])
    return found


def write_letter_tokenizer(path: Path, *, has_types: bool) -> None:
    """Write a tokenizer of single letters, with BERT's marks around and between texts, or RoBERTa's without types."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if has_types else "[CLS] $A [SEP] [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[(name, vocabulary[name]) for name in SPECIAL[2:]]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    names = {"pad_token": SPECIAL[0], "unk_token": SPECIAL[1], "cls_token": SPECIAL[2], "sep_token": SPECIAL[3]}
    inputs = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names).save_pretrained(path)


def write_modules(path: Path, pooling: str, max_seq_length: int) -> None:
    """The files of sentence-transformers: vectors by `pooling`, normalised."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    kinds = [f"sentence_transformers.models.{name}" for name, _ in modules]
    width = json.loads((path / "config.json").read_text())["hidden_size"]
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": folder, "type": kind}
            for index, ((_, folder), kind) in enumerate(zip(modules, kinds, strict=True))
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": width, f"pooling_mode_{pooling}": True},
        "sentence_bert_config.json": {"max_seq_length": max_seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {},
    }
    for _, folder in modules[1:]:
        (path / folder).mkdir()
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
