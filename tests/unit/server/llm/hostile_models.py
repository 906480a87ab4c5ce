"""Model directories of someone who wishes the server ill, or whose disk does: each is the demo model with one fault.

`FAULTS` has for each a function that makes it, and the texts that the error must hold: the file, and the field or the
tensor in it. `HEAVY` has the largest files that are read at all.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

from tests.unit.server.llm.checkpoint_faults import (
    DEEP_JSON,
    HUGE,
    INDEX,
    MANY,
    POOLING,
    TRANSFORMER,
    WEIGHTS,
    Case,
    Fault,
    added_token,
    adding,
    config,
    fields,
    folder,
    gguf,
    gguf_text,
    index,
    link,
    modules,
    only_model,
    pipe,
    replacing,
    rope,
    sparse,
    splitting,
    tensor,
    text,
    token_id,
    tokenizer,
    vocabulary_file,
    weights,
    with_token,
)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORD_PIECE = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
EXPERTS = "model.layers.0.block_sparse_moe."
ONE = {"model.embed_tokens.weight": tensor([2], [0, 8])}
FAULTS: dict[str, Case] = {
    # config.json
    "config is deep": Case(text("config.json", DEEP_JSON), ("config.json",)),
    "config has a deep field": Case(config(rope_parameters=f"json:{DEEP_JSON}"), ("config.json",)),
    "config is empty": Case(text("config.json", ""), ("config.json",)),
    "config is a list": Case(text("config.json", "[]"), ("config.json",)),
    "config is not UTF-8": Case(text("config.json", b'{"a": "\xff"}'), ("config.json",)),
    "config has a field twice": Case(
        text("config.json", '{"vocab_size": 1, "vocab_size": 2}'), ("config.json", "vocab_size")
    ),
    "config is a pipe": Case(pipe("config.json"), ("config.json",)),
    "config is an endless device": Case(link("config.json", "/dev/zero"), ("config.json",)),
    "config is a folder": Case(folder("config.json"), ("config.json",)),
    "config links to itself": Case(link("config.json", "config.json"), ("config.json",)),
    "config is huge": Case(sparse("config.json", 1 << 40), ("config.json",)),
    "config holds millions of values": Case(text("config.json", MANY), ("config.json", "values")),
    "config has one field many times": Case(
        text("config.json", "{" + '"a": 1, ' * 400_000 + '"b": 1, "b": 2}'), ("config.json", "'a'")
    ),
    "architectures is a number": Case(config(architectures=5), ("config.json", "architecture")),
    "architectures holds a table": Case(config(architectures=[{}]), ("architecture",)),
    "vocab_size is a text": Case(config(vocab_size="many"), ("config.json", "vocab_size")),
    "vocab_size is huge": Case(config(vocab_size=HUGE), ("config.json", "vocab_size")),
    "hidden_size has a million digits": Case(config(hidden_size="json:" + "9" * 1_000_000), ("config.json",)),
    "num_hidden_layers is huge": Case(config(num_hidden_layers=2**40), ("config.json", "num_hidden_layers")),
    "num_attention_heads is a list": Case(config(num_attention_heads=[8]), ("config.json", "num_attention_heads")),
    "head_dim is negative": Case(config(head_dim=-2), ("config.json", "head_dim")),
    "rms_norm_eps is NaN": Case(config(rms_norm_eps="json:NaN"), ("config.json", "rms_norm_eps")),
    "hidden_act is a list": Case(config(hidden_act=["silu"]), ("config.json", "hidden_act")),
    "dtype is a table": Case(config(dtype={"a": 1}), ("config.json", "dtype")),
    "tie_word_embeddings is a text": Case(config(tie_word_embeddings="yes"), ("config.json", "tie_word_embeddings")),
    "layer_types holds lists": Case(config(layer_types=[[]] * 8), ("config.json", "layer_types")),
    "max_position_embeddings is a float": Case(
        config(max_position_embeddings=2048.5), ("config.json", "max_position_embeddings")
    ),
    "use_sliding_window with a text": Case(
        config(use_sliding_window=True, sliding_window="wide"), ("config.json", "sliding_window")
    ),
    "rope_theta is infinite": Case(rope(rope_theta=float("inf")), ("config.json", "rope_theta")),
    "rope_theta is NaN": Case(rope(rope_theta=float("nan")), ("config.json", "rope_theta")),
    "rope factor is infinite": Case(rope(rope_type="linear", factor=float("inf")), ("config.json", "factor")),
    "rope_parameters is a list": Case(config(rope_parameters=[1]), ("config.json", "rope_parameters")),
    "rope_type is a list": Case(rope(rope_type=["default"]), ("config.json", "rope type")),
    "rope length is NaN": Case(
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=float("nan")),
        ("config.json", "original_max_position_embeddings"),
    ),
    "rope mscale is huge": Case(rope(rope_type="yarn", factor=2.0, mscale=HUGE), ("config.json", "mscale")),
    "rope factor is infinite and not used": Case(rope(factor=float("inf")), ("config.json", "factor")),
    "rope mscale is NaN and not used": Case(rope(mscale=float("nan")), ("config.json", "mscale")),
    "a GPTQ pattern is long": Case(
        config(quantization_config=GPTQ | {"dynamic": {"-:" + "a" * 501: {}}}), ("dynamic", "500 characters")
    ),
    "a GPTQ pattern is none": Case(config(quantization_config=GPTQ | {"dynamic": {"-:(": {}}}), ("dynamic", "'('")),
    "quantization_config is a list": Case(config(quantization_config=[1]), ("quantization_config",)),
    "quant_method is a list": Case(config(quantization_config={"quant_method": ["gptq"]}), ("quantization_config",)),
    "quantization bits are huge": Case(
        config(quantization_config={"quant_method": "gptq", "bits": HUGE, "group_size": 128}), ("bits",)
    ),
    "quantize_config is a pipe": Case(pipe("quantize_config.json"), ("quantize_config.json",)),
    "quantize_config is deep": Case(text("quantize_config.json", DEEP_JSON), ("quantize_config.json",)),
    "eos_token_id is a table": Case(
        lambda path: (config(eos_token_id={"a": 1})(path), text("generation_config.json", "{}")(path)),
        ("config.json", "eos_token_id"),
    ),
    **{
        f"{name} is {value!r} in {file}": Case(fields(file, **{name: value}), (file, name))
        for name, values in {
            "eos_token_id": ("json:Infinity", "json:NaN", -5, 10**30, 10**6, [1, 10**7], 1.5, True, [1] * 100),
            "bos_token_id": ("json:NaN", 10**30, "x", -5),
            "pad_token_id": ("json:-Infinity", [2**40]),
            "decoder_start_token_id": ("json:NaN", {"a": 1}),
        }.items()
        for value in values
        for file in ("config.json", "generation_config.json")
    },
    "classifier_from_token is a number": Case(config(classifier_from_token=5), ("classifier_from_token",)),
    "id2label of a classifier is a list": Case(
        config(architectures=["BertForSequenceClassification"], id2label=[1]), ("BertForSequenceClassification",)
    ),
    "matryoshka_dimensions are texts": Case(
        lambda path: (
            config(matryoshka_dimensions=["x"])(path),
            modules(TRANSFORMER, POOLING, config='{"pooling_mode": "cls"}')(path),
        ),
        ("config.json", "matryoshka_dimensions"),
    ),
    # generation_config.json
    "generation_config is deep": Case(text("generation_config.json", DEEP_JSON), ("generation_config.json",)),
    "generation_config is a pipe": Case(pipe("generation_config.json"), ("generation_config.json",)),
    "generation_config is a device": Case(link("generation_config.json", "/dev/zero"), ("generation_config.json",)),
    "temperature is infinite": Case(
        fields("generation_config.json", temperature="json:Infinity"), ("generation_config.json", "temperature")
    ),
    "top_k is a list": Case(fields("generation_config.json", top_k=[1]), ("generation_config.json", "top_k")),
    "eos_token_id is negative": Case(
        fields("generation_config.json", eos_token_id=[-5]), ("generation_config.json", "eos_token_id")
    ),
    "eos_token_id is huge": Case(
        fields("generation_config.json", eos_token_id=2**70), ("generation_config.json", "eos_token_id")
    ),
    "eos_token_id is a text": Case(
        fields("generation_config.json", eos_token_id="</s>"), ("generation_config.json", "eos_token_id")
    ),
    # tokenizer_config.json, the chat template, special tokens
    "tokenizer_config is deep": Case(text("tokenizer_config.json", DEEP_JSON), ("tokenizer_config.json",)),
    "tokenizer_config holds millions of values": Case(
        text("tokenizer_config.json", MANY), ("tokenizer_config.json", "values")
    ),
    "tokenizer_config is a pipe": Case(pipe("tokenizer_config.json"), ("tokenizer_config.json",)),
    "tokenizer_config is a folder": Case(folder("tokenizer_config.json"), ("tokenizer_config.json",)),
    "chat_template is a number": Case(
        lambda path: (fields("tokenizer_config.json", chat_template=5)(path), (path / "chat_template.jinja").unlink()),
        ("tokenizer_config.json", "chat_template"),
    ),
    "chat_template is a list of junk": Case(
        lambda path: (
            fields("tokenizer_config.json", chat_template=["x", {}])(path),
            (path / "chat_template.jinja").unlink(),
        ),
        ("tokenizer_config.json", "chat_template"),
    ),
    "chat_template is a table": Case(
        lambda path: (
            fields("tokenizer_config.json", chat_template={"a": "b"})(path),
            (path / "chat_template.jinja").unlink(),
        ),
        ("tokenizer_config.json", "chat_template"),
    ),
    "the template nests": Case(
        text("chat_template.jinja", "{% if messages %}" * 5000 + "{% endif %}" * 5000), ("chat_template.jinja",)
    ),
    "the template's expression nests": Case(
        text("chat_template.jinja", "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"), ("chat_template.jinja",)
    ),
    "the template is a pipe": Case(pipe("chat_template.jinja"), ("chat_template.jinja",)),
    "the template is a device": Case(link("chat_template.jinja", "/dev/zero"), ("chat_template.jinja",)),
    "the template is not UTF-8": Case(text("chat_template.jinja", b"\xff{{ messages }}"), ("chat_template.jinja",)),
    "the template is a folder": Case(folder("chat_template.jinja"), ("chat_template.jinja",)),
    "eos_token is a number": Case(fields("tokenizer_config.json", eos_token=5), ("tokenizer_config.json", "eos_token")),
    "eos_token's content is a list": Case(
        fields("tokenizer_config.json", eos_token={"content": ["x"]}), ("tokenizer_config.json", "eos_token")
    ),
    "add_bos_token is a text": Case(
        fields("tokenizer_config.json", add_bos_token="no"), ("tokenizer_config.json", "add_bos_token")
    ),
    # tokenizer.json
    "the tokenizer is deep": Case(text("tokenizer.json", DEEP_JSON), ("tokenizer.json",)),
    "the tokenizer is empty": Case(text("tokenizer.json", ""), ("tokenizer.json",)),
    "the tokenizer is a list": Case(text("tokenizer.json", "[]"), ("tokenizer.json",)),
    "the tokenizer is a pipe": Case(pipe("tokenizer.json"), ("tokenizer.json",)),
    "the tokenizer is a device": Case(link("tokenizer.json", "/dev/zero"), ("tokenizer.json",)),
    "the tokenizer is a folder": Case(folder("tokenizer.json"), ("tokenizer.json",)),
    "the tokenizer is not UTF-8": Case(text("tokenizer.json", b'{"version": "\xff"}'), ("tokenizer.json",)),
    "a token has an id beyond the embedding": Case(token_id(10**6), ("tokenizer", "1000000", "config.json")),
    "a token has a huge id": Case(token_id(2**32 - 1), ("tokenizer.json", "4294967295")),
    "a special token has a huge id": Case(added_token(id=2**70), ("tokenizer.json",)),
    "a special token is a number": Case(added_token(content=5), ("tokenizer.json",)),
    "the tokenizer has no vocabulary": Case(
        text(
            "tokenizer.json",
            '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        ),
        ("tokenizer.json",),
    ),
    # its chains, patterns and unknown tokens
    "six replacements by a hundred": Case(replacing("normalizer", "normalizers", 6), ("tokenizer.json", "normalizer")),
    "six replacements of a decoder": Case(replacing("decoder", "decoders", 6), ("tokenizer.json", "decoder")),
    "a pre-tokenizer grows texts": Case(
        tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}),
        ("tokenizer.json", "pre_tokenizer"),
    ),
    "a normalizer has many steps": Case(
        tokenizer(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100_000}),
        ("tokenizer.json", "100000 steps"),
    ),
    "a million special tokens are added": Case(
        tokenizer(post_processor=adding("x", x=[1] * 10**6)), ("tokenizer.json", "1000000 tokens")
    ),
    "a hundred special tokens are added": Case(
        tokenizer(post_processor=adding(*["x"] * 100, x=[1])), ("tokenizer.json", "100 tokens")
    ),
    "a text is written twice": Case(
        tokenizer(post_processor=adding() | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}),
        ("tokenizer.json", "repeats a text"),
    ),
    "an added token is missing": Case(tokenizer(post_processor=adding("x")), ("tokenizer.json", "'x'")),
    "an added token has an unknown id": Case(
        tokenizer(post_processor=adding("x", x=[10**9])), ("tokenizer.json", "1000000000")
    ),
    "a mark has an unknown id": Case(
        tokenizer(post_processor={"type": "BertProcessing", "sep": ["</s>", 10**8], "cls": ["<s>", 1]}),
        ("tokenizer.json", "100000000"),
    ),
    **{
        f"a pattern is {pattern}": Case(splitting(pattern), ("tokenizer.json", "pattern"))
        for pattern in ("(a+)+$", "(.*)*x", ".*.*.*.*x", r"\s*\s*\s*z", "(", "(.)\\1*x", "a" * 10_000)
    },
    "a replaced pattern is catastrophic": Case(
        tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}),
        ("tokenizer.json", "normalizer", "pattern"),
    ),
    "WordLevel has no unknown token": Case(
        only_model("WordLevel", vocab={"a": 0}, unk_token="[UNK]"), ("tokenizer.json", "[UNK]")
    ),
    "WordPiece has no unknown token": Case(
        only_model("WordPiece", vocab={"a": 0}, unk_token="[UNK]", **WORD_PIECE), ("tokenizer.json", "[UNK]")
    ),
    "WordPiece has endless words": Case(
        only_model("WordPiece", vocab={"a": 0}, unk_token="a", **WORD_PIECE | {"max_input_chars_per_word": 10**9}),
        ("tokenizer.json", "max_input_chars_per_word"),
    ),
    "Unigram has no unknown token": Case(
        only_model("Unigram", vocab=[["a", -1.0]], unk_id=None), ("tokenizer.json", "unk_id")
    ),
    "BPE has no unknown token": Case(
        only_model("BPE", vocab={"a": 0}, merges=[], unk_token="[UNK]"), ("tokenizer.json", "[UNK]")
    ),
    **{
        f"the character map is {written!r}": Case(
            tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": written}),
            ("tokenizer.json", "precompiled_charsmap"),
        )
        for written in ("AAAA", "BAAAAP////8AAAAA", "", "?")
    },
    "pieces of no characters": Case(
        tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), ("tokenizer.json", "0 characters")
    ),
    "a token has 5000 characters": Case(tokenizer(model=with_token("a" * 5000)), ("tokenizer.json", "5000 characters")),
    "a special token has 5000 characters": Case(added_token(content="a" * 5000), ("tokenizer.json", "5000 characters")),
    "a Unigram token has 600 characters": Case(
        only_model("Unigram", vocab=[["a", -1.0], ["b" * 600, -1.0]], unk_id=0), ("tokenizer.json", "600 characters")
    ),
    "the tokenizer holds millions of values": Case(
        lambda path: text("tokenizer.json", '{"version": "1.0", "added_tokens": [' + "1," * 3_000_000 + "1]}")(path),
        ("tokenizer.json", "values"),
    ),
    "the tokenizer has two normalizers": Case(
        text("tokenizer.json", '{"normalizer": null, "normalizer": {"type": "NFC"}}'), ("tokenizer.json", "twice")
    ),
    # a tokenizer without tokenizer.json
    "a vocabulary has a long line": Case(vocabulary_file("vocab.txt", b"a" * 10**6), ("vocab.txt", "1000000")),
    "a vocabulary is huge": Case(vocabulary_file("vocab.txt", b"a\n" * (20 << 20)), ("vocab.txt", "bytes")),
    "a vocabulary holds millions of values": Case(
        vocabulary_file("vocab.json", MANY.encode()), ("vocab.json", "values")
    ),
    "merges have a long line": Case(
        lambda path: (vocabulary_file("vocab.json", b"{}")(path), text("merges.txt", b"a" * 10**6)(path)),
        ("merges.txt", "1000000"),
    ),
    "a piece of SentencePiece is long": Case(
        vocabulary_file("tokenizer.model", b"\x0a\x8b\x27\x0a\x88\x27" + b"a" * 5000), ("tokenizer.model", "5000 bytes")
    ),
    "pieces of SentencePiece are long": Case(
        vocabulary_file("tokenizer.model", (b"\x0a\xa3\x1f\x0a\xa0\x1f" + b"a" * 4000) * 20),
        ("tokenizer.model", "long tokens"),
    ),
    # weights
    "the shape is astronomical": Case(weights({"a": tensor([2**40] * 400, [0, 8])}, bytes(8)), (WEIGHTS, "'a'")),
    "the shape has a million sides": Case(weights({"a": tensor([1] * 10**6, [0, 8])}, bytes(8)), (WEIGHTS, "'a'")),
    "the shape is negative": Case(weights({"a": tensor([-2], [0, 8])}, bytes(8)), (WEIGHTS, "'a'")),
    "the shape is a text": Case(weights({"a": tensor("2", [0, 8])}, bytes(8)), (WEIGHTS, "'a'")),
    "the type is a list": Case(weights({"a": tensor([2], [0, 8], ["F32"])}, bytes(8)), (WEIGHTS, "'a'")),
    "offsets overlap": Case(
        weights({"a": tensor([2], [0, 8]), "b": tensor([2], [4, 12])}, bytes(12)), (WEIGHTS, "'b'")
    ),
    "offsets leave the file": Case(weights({"a": tensor([200], [0, 800])}, bytes(8)), (WEIGHTS, "'a'")),
    "offsets are huge": Case(weights({"a": tensor([2], [HUGE, HUGE + 8])}, bytes(8)), (WEIGHTS, "'a'")),
    "offsets are floats": Case(weights({"a": tensor([2], [0.0, 8.0])}, bytes(8)), (WEIGHTS, "'a'")),
    "the header's length lies": Case(weights(ONE, bytes(8), length=2**63), (WEIGHTS,)),
    "the header's length is short": Case(weights(ONE, bytes(8), length=10), (WEIGHTS,)),
    "the header is deep": Case(weights(DEEP_JSON), (WEIGHTS,)),
    "the header holds millions of values": Case(
        weights('{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[' + "1," * 2_000_000 + "2]}}"), (WEIGHTS, "values")
    ),
    "a billion experts have no bytes": Case(
        weights({f"{EXPERTS}experts.gate_up_proj": tensor([10**9, 0, 2], [0, 0])}), (WEIGHTS, "[1000000000, 0, 2]")
    ),
    "gpt-oss has a billion experts": Case(
        weights({f"{EXPERTS}experts.gate_up_proj_bias": tensor([10**9, 0], [0, 0]), **ONE}, bytes(8)),
        (WEIGHTS, "[1000000000, 0]"),
    ),
    "the header is a list": Case(weights([]), (WEIGHTS,)),
    "the header names a tensor twice": Case(
        weights('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', bytes(8)), (WEIGHTS,)
    ),
    "a tensor's name is long": Case(weights({"a" * 10**6: tensor([2], [0, 4])}, bytes(8)), (WEIGHTS,)),
    "a tensor's name is a terminal's": Case(weights({"\x1b[2J\n": tensor([2], [0, 4])}, bytes(8)), (WEIGHTS,)),
    "the weights are empty": Case(text(WEIGHTS, b""), (WEIGHTS,)),
    "the weights are a pipe": Case(pipe(WEIGHTS), (WEIGHTS,)),
    "the weights are a device": Case(link(WEIGHTS, "/dev/zero"), (WEIGHTS,)),
    "the weights are a folder": Case(folder(WEIGHTS), (WEIGHTS,)),
    "the weights link to themselves": Case(link(WEIGHTS, WEIGHTS), (WEIGHTS,)),
    "the weights link to nothing": Case(link(WEIGHTS, "gone"), (WEIGHTS,)),
    # the index of several files
    "the index leaves the folder": Case(index({"a": "../model.safetensors"}), (INDEX, "'a'")),
    "the index names an absolute path": Case(index({"a": "/etc/passwd.safetensors"}), (INDEX, "'a'")),
    "the index names a number": Case(index({"a": 5}), (INDEX, "'a'")),
    "the index is a list": Case(index([1]), (INDEX,)),
    "the index names half a character": Case(index({"a": "\ud800.safetensors"}), (INDEX, "'a'")),
    "the index is deep": Case(lambda path: ((path / WEIGHTS).unlink(), text(INDEX, DEEP_JSON)(path)), (INDEX,)),
    "the index is a pipe": Case(lambda path: ((path / WEIGHTS).unlink(), pipe(INDEX)(path)), (INDEX,)),
    "the index is a device": Case(lambda path: ((path / WEIGHTS).unlink(), link(INDEX, "/dev/zero")(path)), (INDEX,)),
    "the index names a pipe": Case(
        lambda path: (index({"a": "x.safetensors"})(path), os.mkfifo(path / "x.safetensors")), ("x.safetensors",)
    ),
    # sentence-transformers
    "modules are deep": Case(text("modules.json", DEEP_JSON), ("modules.json",)),
    "modules is a pipe": Case(pipe("modules.json"), ("modules.json",)),
    "modules are numbers": Case(text("modules.json", "[1]"), ("modules.json",)),
    "a module leaves the folder": Case(
        modules(TRANSFORMER, POOLING | {"path": "../../x"}), ("modules.json", "../../x")
    ),
    "a module has an absolute path": Case(modules(TRANSFORMER, POOLING | {"path": "/etc"}), ("modules.json", "/etc")),
    "a module's path is a list": Case(modules(TRANSFORMER, POOLING | {"path": [1]}), ("modules.json",)),
    "a module's path has a zero byte": Case(modules(TRANSFORMER, POOLING | {"path": "a\0b"}), ("modules.json",)),
    "pooling is a table": Case(
        modules(TRANSFORMER, POOLING, config='{"pooling_mode": {"a": 1}}'), ("1_Pooling/config.json",)
    ),
    "pooling is a list of lists": Case(
        modules(TRANSFORMER, POOLING, config='{"pooling_mode": [["cls"]]}'), ("1_Pooling/config.json",)
    ),
    "prompts are numbers": Case(
        lambda path: (
            modules(TRANSFORMER, POOLING, config='{"pooling_mode": "cls"}')(path),
            text("config_sentence_transformers.json", '{"prompts": {"query": 5}}')(path),
        ),
        ("config_sentence_transformers.json", "prompts"),
    ),
    "the default prompt is a list": Case(
        lambda path: (
            modules(TRANSFORMER, POOLING, config='{"pooling_mode": "cls"}')(path),
            text("config_sentence_transformers.json", '{"default_prompt_name": [1]}')(path),
        ),
        ("config_sentence_transformers.json", "default_prompt_name"),
    ),
    "max_seq_length is a text": Case(
        lambda path: (
            modules(TRANSFORMER, POOLING, config='{"pooling_mode": "cls"}')(path),
            text("sentence_bert_config.json", '{"max_seq_length": "long"}')(path),
        ),
        ("sentence_bert_config.json", "max_seq_length"),
    ),
    # GGUF
    "GGUF is empty": Case(lambda path: (gguf()(path), (path / "model.gguf").write_bytes(b"")), ("model.gguf",)),
    "GGUF of another version": Case(gguf(version=99), ("model.gguf",)),
    "GGUF without an architecture": Case(gguf(), ("model.gguf", "architecture")),
    "GGUF's architecture is a number": Case(
        gguf(("general.architecture", 4, struct.pack("<I", 5))), ("model.gguf", "general.architecture")
    ),
    "GGUF announces many settings": Case(
        lambda path: (gguf()(path), (path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63))),
        ("model.gguf",),
    ),
    "GGUF has a long token": Case(
        gguf(("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1) + gguf_text("a" * 100_000))),
        ("model.gguf", "100000 bytes"),
    ),
    "GGUF announces a long text": Case(gguf(("general.architecture", 8, struct.pack("<Q", 2**62))), ("model.gguf",)),
    "GGUF announces a long list": Case(
        gguf(("general.architecture", 9, struct.pack("<IQ", 4, 2**62))), ("model.gguf",)
    ),
    "GGUF without a size": Case(
        gguf(("general.architecture", 8, gguf_text("llama")), ("padding", 8, gguf_text("x" * 64))),
        ("model.gguf", "llama."),
    ),
    "GGUF is a pipe": Case(
        lambda path: (gguf()(path), (path / "model.gguf").unlink(), os.mkfifo(path / "model.gguf")), ("model.gguf",)
    ),
    "GGUF is a device": Case(
        lambda path: (gguf()(path), (path / "model.gguf").unlink(), (path / "model.gguf").symlink_to("/dev/zero")),
        ("model.gguf",),
    ),
}


MEGABYTES = 60_000_000


def names() -> dict[str, int]:
    return {f"z{number:042d}": number for number in range(10**5, 5 * 10**5)}


def added_tokens(count: int) -> Callable[[Any], Any]:
    plain = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    return lambda old: [*old, *({"id": 10**5 + i, "content": f"<{i:0100d}>", **plain} for i in range(count))]


def with_tokens(tokens: Callable[[], dict[str, int]]) -> Fault:
    return tokenizer(model=lambda model: model | {"vocab": model["vocab"] | tokens()})


def many_tensors() -> str:
    tensors = (f'"{i:0300d}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(250_000))
    return "{" + ",".join(tensors) + "}"


# Files as large as they may be, or larger, some of which are served. They are made when they are needed.
HEAVY: dict[str, Fault] = {
    "config.json is one text": lambda path: config(note="x" * MEGABYTES)(path),
    "config.json is one text of wide characters": lambda path: config(
        note='json:"' + "\U0001f600" * (MEGABYTES // 4) + '"'
    )(path),
    "config.json has many names": lambda path: config(note=names())(path),
    "tokenizer_config.json is one text": lambda path: fields("tokenizer_config.json", note="x" * MEGABYTES)(path),
    "tokenizer_config.json has many names": lambda path: fields("tokenizer_config.json", note=names())(path),
    "a vocabulary of 400,000 tokens": with_tokens(names),
    "a vocabulary of long tokens": with_tokens(lambda: {f"{i:04000d}": 10**5 + i for i in range(15_000)}),
    "many added tokens": tokenizer(added_tokens=added_tokens(100_000)),
    "a header of 95 MB": lambda path: weights(
        '{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[' + "1," * 47_000_000 + "2]}}"
    )(path),
    "a header of many tensors": lambda path: weights(many_tensors())(path),
    "a header of one text": lambda path: weights({"__metadata__": {"a": "x" * 95_000_000}})(path),
}
