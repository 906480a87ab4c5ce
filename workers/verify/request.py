"""The model and token ids of a verification, as JSON files in the folder that all of its processes share.

Torch-free; transformers is imported only to run the checkpoint's own tokenizer.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError

NEW_TOKENS = 12  # generated after each prompt
NUM_SLOTS = 2  # slots for adapters if one is verified
MAX_TOKENS = 512  # limit over all prompts, because every tensor of every layer is kept for each token
BUILT_IN_PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "def area(radius):\n    return 3.14159 * ",
    "Q: What is the capital of France?\nA:",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_RANDOM_LENGTHS = (19, 11, 5)


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """The model, dtype and prompts; read by the reference process and by every rank."""

    model: str  # a directory
    dtype: str  # resolved: float32 | bfloat16 | float16
    device: str  # resolved: cpu | cuda
    prompts: list[list[int]]
    new_tokens: int
    record: bool = True  # tensors as well as tokens
    quantization: str = "none"  # quantization of the weights, at load
    dequantize: bool = False  # weights are dequantised to `dtype`
    num_threads: int | None = None  # threads of the reference; None: torch's own choice
    follows_choices: bool = False  # the reference runs again, and follows the choices of experts that ranks recorded
    adapter: str | None = None  # directory or GGUF file of a LoRA adapter

    def is_adapted(self, sequence: int) -> bool:
        """Return whether a sequence has the adapter: all but the last of several, whose rows must not change."""
        return self.adapter is not None and (sequence == 0 or sequence < len(self.prompts) - 1)

    def write(self, folder: Path) -> None:
        (folder / "request.json").write_text(json.dumps(asdict(self)), "utf-8")

    @staticmethod
    def read(folder: Path) -> "VerifyRequest":
        return VerifyRequest(**json.loads((folder / "request.json").read_text("utf-8")))


@dataclass(frozen=True, slots=True)
class Text:
    """Prompts and transformers' greedy continuation of each, as token ids."""

    prompts: list[list[int]]
    outputs: list[list[int]]

    def inputs(self) -> list[list[int]]:
        """Return the token ids that are fed to the model, per sequence. The last generated token is only an output."""
        return [prompt + output[:-1] for prompt, output in zip(self.prompts, self.outputs, strict=True)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all `inputs`: the rows T of every recorded tensor."""
        return sum(len(sequence) for sequence in self.inputs())

    @property
    def checkpoints(self) -> list[int]:
        """Number of tokens of each prompt after which recurrent state is saved, for the tokens behind them to be
        computed again from it; 0 if there is only one token."""
        return [len(prompt) // 2 for prompt in self.prompts]

    def write(self, folder: Path) -> None:
        (folder / "text.json").write_text(json.dumps(asdict(self)), "utf-8")

    @staticmethod
    def read(folder: Path) -> "Text":
        return Text(**json.loads((folder / "text.json").read_text("utf-8")))


def read_prompts(path: Path) -> list[str]:
    """Read one prompt per line, without empty lines. Raises `StartupError` if the file cannot be read."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise StartupError(f"--prompts: {path} does not exist.", "Check the path.") from None
    except UnicodeDecodeError as error:
        raise StartupError(
            f"--prompts: {path} is not UTF-8 text (byte {error.start}).", "Save it as UTF-8, one prompt per line."
        ) from None
    except OSError as error:
        raise StartupError(f"--prompts: {path} cannot be read: {error.strerror}.", "Give a readable file.") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise StartupError(f"--prompts: {path} holds no prompt.", "Write one prompt per line.")
    return prompts


def has_tokenizer(model: Path) -> bool:
    return any((model / name).is_file() for name in _TOKENIZER_FILES)


def random_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Return token ids for a model without a tokenizer, drawn from a fixed seed."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(min(length, longest))] for length in _RANDOM_LENGTHS]


def tokenize(model: Path, texts: list[str], vocab_size: int, longest: int) -> list[list[int]]:
    """Return `texts` as token ids, by the checkpoint's own tokenizer. `longest`: tokens that a prompt may have.

    Raises `StartupError` if the tokenizer cannot be used, or if the model cannot take a prompt.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        prompts = [list(tokenizer(text)["input_ids"]) for text in texts]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        detail = " ".join(str(error).split())[:160]
        raise StartupError(
            f"the tokenizer of {model} cannot be used ({type(error).__name__}: {detail}).",
            "Complete its tokenizer files, or remove them to verify on seeded token ids.",
        ) from None
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise StartupError(f"prompt {number} has no tokens.", "Leave it out.")
        if max(prompt) >= vocab_size:
            raise StartupError(
                f"prompt {number} has token id {max(prompt)}, beyond the model's {vocab_size} ids.",
                "Use the tokenizer that belongs to this checkpoint.",
            )
        if len(prompt) > longest:
            raise StartupError(
                f"prompt {number} has {len(prompt)} tokens; the model has room for {longest}.", "Shorten it."
            )
    total = sum(map(len, prompts))
    if total > MAX_TOKENS:
        raise StartupError(
            f"the prompts have {total} tokens, and every tensor of every layer is kept for each: the limit is "
            f"{MAX_TOKENS}.",
            "Give fewer or shorter prompts.",
        )
    return prompts
