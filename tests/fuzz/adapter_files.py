"""Hostile adapter files, made from good ones by a seed, and the check of how they are read.

    python -m tests.fuzz.adapter_files --files 20000

A file is read, or refused by one short line that names a file and by one fix. Python's memory stays within a multiple
of the files' size. Then a rank reads its part of the files that were accepted, with the same rule.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.adapter_digest import GGUF_SUFFIX, SETTINGS_FILE, WEIGHTS_FILE, adapter_digest
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_slots import AdapterSlots
from oarlock.workers.lora.rank_adapter import read_adapter
from tests.fuzz.seeded import finish, seed_of

GGUF_FILE = f"adapter{GGUF_SUFFIX}"
_FREE_BYTES, _BYTES_PER_BYTE = 4 << 20, 64  # memory that any file may take, and memory for each byte of a file
_LONGEST = 2000  # characters of an error
_MOST_DIGESTED = 1 << 30  # bytes of the largest file, all of which a digest reads
_EVIL = ("(a+)+$", "(.*)*x", "(?:a|a)*b", "(", "[", "\\", "a{1,100000}{1,100000}", "(?P<x>a)(?P<x>b)", "^" * 500,
         "\\1", ".*" * 60, "(?=.*(.*(.*(.*x))))", "model.layers.0", "q_proj|v_proj", "(?i:Q_PROJ)", "\u202e",
         "\x00")  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, 10**30, -(10**30), 0.0, -0.0, 0.5, 1e-320, 1e308,
    "", "a", "none", "all", "LORA", "all-linear", "x" * 5000, "\x1b[31m", "\u202e\u0000", "../../etc/passwd", [], [[]],
    ["q_proj"], ["q_proj"] * 400, [None], [1, 2], [0], {}, {"q_proj": 1}, {"a": {"b": {}}}, {".*": 4}, {"": 2}, *_EVIL,
)  # fmt: skip
_FIELDS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias",
           "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters",
           "modules_to_save", "fan_in_fan_out", "init_lora_weights", "layer_replication", "lora_bias", "use_qalora",
           "trainable_token_indices", "alora_invocation_tokens", "ensure_weight_tying", "unknown_field")  # fmt: skip
_SIZES = (0, 1, 2, 3, 8, 64, 320, -1, 2**31, 2**32, 2**62, 2**63, 2**64, 10**40, 1.5, True, None, "8", [8])
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8", "I64", "BOOL", "U8", "F4", "", "f32", 7, None)
_NAMES = ("", "x", "lora_A.weight", "base_model.model.lora_A.weight", "a" * 5000, "\x00", "\u202e", "🦄.lora_B.weight",
          "base_model.model.lm_head.weight", "base_model.model.model.layers.99.mlp.up_proj.lora_A.weight",
          "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", "__metadata__", "/etc/passwd",
          "base_model.model." * 300 + "q_proj.lora_A.weight")  # fmt: skip


class Source:
    """A good adapter in PEFT's files and in llama.cpp's, and the model that it belongs to."""

    def __init__(self, peft: Path, gguf: Path, spec: DecoderSpec, slots: AdapterSlots) -> None:
        self.config: dict[str, Any] = json.loads((peft / SETTINGS_FILE).read_text("utf-8"))
        self.weights = (peft / WEIGHTS_FILE).read_bytes()
        self.gguf = gguf.read_bytes()
        self.spec, self.slots = spec, slots

    def write(self, folder: Path, chance: random.Random) -> str:
        """Write a damaged adapter to `folder`, and return the kind of the damage."""
        kind, make = chance.choice(_KINDS)
        make(self, folder, chance)
        return kind


def config_values(source: Source, folder: Path, chance: random.Random) -> None:
    """Settings with other values, of other types and for other fields."""
    config = dict(source.config)
    for _ in range(chance.randint(1, 3)):
        config[chance.choice(_FIELDS)] = chance.choice(_VALUES)
    if chance.random() < 0.3:
        keys = [chance.choice((*_EVIL, "q_proj", "model.layers.0.mlp")) for _ in range(chance.choice((1, 3, 1200)))]
        config[chance.choice(("rank_pattern", "alpha_pattern"))] = dict.fromkeys(keys, chance.choice((4, 1, "4", -1)))
    _write(folder, json.dumps(config).encode(), source.weights)


def config_text(source: Source, folder: Path, chance: random.Random) -> None:
    """Settings that are no JSON, or JSON that is hard to read."""
    good = json.dumps(source.config)
    texts = (
        b"", b"null", b"[]", b"3", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{" * 20_000, b"[" * 20_000 + b"]" * 20_000,
        good[:-1].encode(), (good + good).encode(), good.replace("4", "1e999", 1).encode(), good.encode("utf-16"),
        good.replace(": 4", ": " + "9" * 6000, 1).encode(), good.replace(": 4", ": NaN", 1).encode(),
        b'{"r": 4, "r": 8, ' + good[1:].encode(), _spoiled(good.encode(), chance), b'{"a": "' + b"\\ud800" * 50 + b'"}',
    )  # fmt: skip
    _write(folder, chance.choice(texts), source.weights)


def header_values(source: Source, folder: Path, chance: random.Random) -> None:
    """A header of safetensors with other dtypes, shapes, ranges and names."""
    header, data = _split(source.weights)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice([one for one in header if one != "__metadata__"])
        entry: dict[str, Any] = dict(header[name])
        match chance.randrange(8):
            case 0:
                entry["dtype"] = chance.choice(_DTYPES)
            case 1:
                entry["shape"] = [chance.choice(_SIZES) for _ in range(chance.choice((0, 1, 2, 2, 3, 200)))]
            case 2:
                entry["data_offsets"] = [chance.choice((*_SIZES, *entry.get("data_offsets", ()))) for _ in range(2)]
            case 3:
                entry.pop(chance.choice(("dtype", "shape", "data_offsets")), None)
            case 4:
                del header[name]
                name = chance.choice(_NAMES)
            case 5:
                entry["shape"] = entry.get("shape", [])[::-1]
            case 6:
                name = chance.choice(
                    (name.replace("lora_A", "lora_B"), name + ".x", name.upper(), name.replace(".", ".."))
                )
            case _:
                size, start = chance.choice((1, 2**20, 2**40)), len(data)
                entry = {"dtype": "F32", "shape": [size, 1], "data_offsets": [start, start + 4 * size]}
                name = chance.choice(_NAMES)
        header[name] = entry
    _write(folder, json.dumps(source.config).encode(), _joined(json.dumps(header).encode(), data))


def header_bytes(source: Source, folder: Path, chance: random.Random) -> None:
    """A header that is too long, too short, cut off, or that has other bytes."""
    size, text, data = source.weights[:8], *_texts(source.weights)
    wrong = chance.choice((0, 1, 7, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    whole = (
        struct.pack("<Q", wrong) + text + data,
        source.weights[: chance.randrange(len(source.weights))],
        source.weights + chance.randbytes(chance.choice((1, 8, 4096))),
        size + _spoiled(text, chance)[: len(text)].ljust(len(text)) + data,
        _joined(b"{" * 50_000, data), _joined(b"[]", data), _joined(b"{}", b""), _joined(text + b" " * 90_000, data),
        b"PK\x03\x04" + source.weights, b"GGUF" + source.weights, b"version https://git-lfs.github.com/spec/v1\n",
        size + text + _not_finite(data, chance),
    )  # fmt: skip
    _write(folder, json.dumps(source.config).encode(), chance.choice(whole))


def gguf_bytes(source: Source, folder: Path, chance: random.Random) -> None:
    """A GGUF file with other counts, lengths and types, or that is cut off."""
    data = bytearray(source.gguf)
    for _ in range(chance.randint(1, 3)):
        at = chance.choice(
            (4, 8, 16, chance.randrange(24, len(data) - 8), chance.randrange(24, min(900, len(data) - 8)))
        )
        number = chance.choice((0, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
        form = chance.choice(("<Q", "<I", "<B"))
        number &= (1 << 8 * struct.calcsize(form)) - 1
        struct.pack_into(form, data, at, number)
    text = bytes(data)
    if chance.random() < 0.3:
        text = text[: chance.randrange(len(text))] if chance.random() < 0.5 else _spoiled(text, chance)
    (folder / GGUF_FILE).write_bytes(text)


def gguf_names(source: Source, folder: Path, chance: random.Random) -> None:
    """A GGUF file whose names are changed into others of the same length."""
    for old, new in ((b"blk.0", b"blk.9"), (b"lora_a", b"lora_b"), (b"attn_q", b"attn_x"), (b"llama", b"qwen2"),
                     (b"adapter", b"adaqter"), (b"lora", b"l\x00ra"), (b"weight", b"\xff\xfeight")):  # fmt: skip
        if chance.random() < 0.4:
            source_text = source.gguf.replace(old, new, chance.choice((1, 2, -1)))
            break
    else:
        source_text = source.gguf.replace(b"ffn_up", b"ffn\x1bup")
    (folder / GGUF_FILE).write_bytes(source_text)


def special_files(source: Source, folder: Path, chance: random.Random) -> None:
    """Directories, pipes, links, sparse files and pickles in place of files."""
    _write(folder, json.dumps(source.config).encode(), source.weights)
    path = folder / chance.choice((SETTINGS_FILE, WEIGHTS_FILE))
    match chance.randrange(8):
        case 0:
            path.unlink()
            path.mkdir()
        case 1:
            path.unlink()
            os.mkfifo(path)
        case 2:
            path.unlink()
            path.symlink_to(chance.choice(("/dev/zero", "/dev/null", "nowhere", path.name, "/proc/self/mem", "..")))
        case 3:
            os.truncate(path, 1 << 40)  # takes no room on the disk
        case 4:
            path.rename(folder / chance.choice(("adapter_model.bin", "x.gguf", "adapter_model.pt", "\u202e.json")))
        case 5:
            (folder / GGUF_FILE).write_bytes(source.gguf)
            path.unlink()
        case 6:
            (folder / "new_embeddings.safetensors").write_bytes(source.weights)
        case _:
            path.write_bytes(b"")


_KINDS: tuple[tuple[str, Callable[[Source, Path, random.Random], None]], ...] = (
    ("values of settings", config_values), ("text of settings", config_text), ("values of the header", header_values),
    ("bytes of the header", header_bytes), ("GGUF bytes", gguf_bytes), ("GGUF names", gguf_names),
    ("special files", special_files),
)  # fmt: skip


def problem_of(folder: Path, source: Source) -> tuple[str, str | None]:
    """Read the adapter in `folder`. Return the outcome, and a sentence about a problem with it or None."""
    num_bytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    if max((path.stat().st_size for path in folder.iterdir() if path.exists()), default=0) < _MOST_DIGESTED:
        try:
            adapter_digest(folder)
        except OSError:
            pass
        except Exception as error:
            return "crash", f"in the digest, {type(error).__name__}: {error}"
    try:
        adapter = Adapter.open(folder, source.spec)
    except StartupError as error:
        problem = _problem_of_error(error, folder)
        return "refused", problem or _problem_of_memory(num_bytes, before)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    try:
        held = read_adapter(adapter, source.slots)
    except StartupError as error:
        return "refused by a rank", _problem_of_error(error, None) or _problem_of_memory(num_bytes, before)
    except Exception as error:
        return "crash", f"on a rank, {type(error).__name__}: {error}"
    size = sum(pair.a.nbytes + pair.b.nbytes for pairs in held.pairs.values() for pair in pairs)
    if size > source.slots.num_bytes:
        return "read", f"{size} bytes in host memory, more than the slots have"
    return "read", _problem_of_memory(num_bytes, before)


def _problem_of_error(error: StartupError, folder: Path | None) -> str | None:
    for text in (error.cause, error.fix):
        if not text or len(text) > _LONGEST or not text.isprintable():
            return f"a line of {len(text)} characters, or that is no plain line: {text[:300]!r}"
    if folder is not None and str(folder) not in error.cause:
        return f"no file is named: {error.cause[:300]!r}"
    return None


def _problem_of_memory(num_bytes: int, before: int) -> str | None:
    taken = tracemalloc.get_traced_memory()[1] - before
    if taken > _FREE_BYTES + _BYTES_PER_BYTE * num_bytes:
        return f"{taken} bytes of memory for files of {num_bytes} bytes"
    return None


def fuzz(source: Source, files: int, seed: int, root: Path) -> tuple[list[str], Counter[str]]:
    """Read `files` damaged adapters. Return the problems, with the number of the file, and the number of outcomes."""
    problems, outcomes, open_files = [], Counter[str](), len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    try:
        for number in range(files):
            folder = root / "adapter"
            folder.mkdir()
            kind = source.write(folder, random.Random(f"{seed}-{number}"))
            outcome, problem = problem_of(folder, source)
            outcomes[outcome] += 1
            if problem is not None:
                problems.append(f"file {number} of seed {seed} ({kind}): {problem}")
            shutil.rmtree(folder)
    finally:
        tracemalloc.stop()
    if len(os.listdir("/proc/self/fd")) > open_files + 2:
        problems.append("files stay open")
    return problems, outcomes


def _write(folder: Path, config: bytes, weights: bytes) -> None:
    (folder / SETTINGS_FILE).write_bytes(config)
    (folder / WEIGHTS_FILE).write_bytes(weights)


def _texts(weights: bytes) -> tuple[bytes, bytes]:
    """Return the header's text and the data."""
    end = 8 + int.from_bytes(weights[:8], "little")
    return weights[8:end], weights[end:]


def _split(weights: bytes) -> tuple[dict[str, Any], bytes]:
    text, data = _texts(weights)
    return json.loads(text), data


def _joined(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _spoiled(text: bytes, chance: random.Random) -> bytes:
    """Replace, cut out or double some bytes."""
    start = chance.randrange(len(text))
    end = min(len(text), start + chance.randint(1, 8))
    middle = chance.choice((b"", text[start:end] * 2, chance.randbytes(end - start)))
    return text[:start] + middle + text[end:]


def _not_finite(data: bytes, chance: random.Random) -> bytes:
    """Put NaN or infinity somewhere into float32 values."""
    at = 4 * chance.randrange(len(data) // 4)
    value = struct.pack("<f", chance.choice((float("nan"), float("inf"), -float("inf"), 3e38)))
    return data[:at] + value + data[at + 4 :]


def main(arguments: list[str] | None = None) -> int:
    from tests.fuzz.adapter_source import make_source

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.adapter_files", description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=20_000, help="damaged adapters (default: 20,000)")
    parser.add_argument("--seed", type=int, help="of the damage (default: a new one, printed)")
    given = parser.parse_args(arguments)
    seed = seed_of(given)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        problems, outcomes = fuzz(make_source(Path(name)), given.files, seed, Path(name))
    print(f"{given.files} adapters in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    return finish(problems, seed)


if __name__ == "__main__":
    raise SystemExit(main())
