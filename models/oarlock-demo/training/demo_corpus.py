"""Training text for the demo model, taken from nothing but the running CPython's own files.

Two kinds of text come from here: whole source files and documentation (to learn what Python looks like), and
`Fact`s, pairs of a dotted name and the opening of its docstring (to learn to answer questions). Everything is in
sorted order and drawn from seeded generators, so the same interpreter and the same seed give the same text.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

STDLIB = Path(sysconfig.get_paths()["stdlib"])
# `this` and `antigravity` act when imported; the rest is tests, generated tables, somebody else's code, or names
# that only repeat another module (`posixpath` is `os.path`).
SKIPPED_MODULES = {
    *("this", "antigravity", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "distutils"),
    *("encodings", "pydoc_data", "__main__", "__phello__", "posix", "nt", "posixpath", "ntpath", "genericpath"),
    *("nturl2path", "xxsubtype", "xxlimited", "xxlimited_35"),
}
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "_bundled",
    "pydoc_data",
}
VOCABULARY = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The way Qwen2's own tokenizer cuts text, so that loaders that rebuild it by model type get the same tokens.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHRASINGS = (
    "What does {} do?",
    "What is {} for?",
    "Explain {}.",
    "Describe {} in Python.",
    "What is {}?",
    "Tell me about {}.",
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "Answer briefly.",
)
NOT_A_SENTENCE_END = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|no|resp)|\b[A-Z])\.$", re.IGNORECASE)


@dataclass(frozen=True)
class Fact:
    """Knowledge about one public name for the model to learn: `answer` always begins with `sentence`."""

    name: str
    sentence: str
    answer: str


def source_files() -> list[Path]:
    """Every Python file of the standard library worth reading, sorted by path."""
    return [
        path
        for path in sorted(STDLIB.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(path.relative_to(STDLIB).parts[:-1])
        and not any(part.startswith("config-") for part in path.relative_to(STDLIB).parts)
        and not path.name.startswith("_sysconfigdata")
    ]


def split_held_out(files: list[Path], seed: int, share: float = 0.015) -> tuple[list[Path], list[Path]]:
    """Divide the files into (trained on, held out); `os.path`'s own file is always trained on."""
    candidates = [path for path in files if path.stem not in ("posixpath", "genericpath", "os")]
    held_out = set(random.Random(f"held-out-{seed}").sample(candidates, max(1, round(share * len(files)))))
    return [path for path in files if path not in held_out], sorted(held_out)


def read_source(path: Path) -> str:
    """The file's text; a few old files are not UTF-8, and a stray byte in them does not matter here."""
    return path.read_text(encoding="utf-8", errors="replace")


def topics() -> list[str]:
    """The language reference's help topics, the prose part of the corpus."""
    from pydoc_data.topics import topics as by_name

    return [by_name[name] for name in sorted(by_name)]


def public_modules() -> list[ModuleType]:
    """Import the standard library's public modules, those with the shortest names first."""
    names = {name for name in sys.stdlib_module_names if not name.startswith("_")} | {"os.path"}
    for name in sorted(names - SKIPPED_MODULES):
        folder = STDLIB / name
        if (folder / "__init__.py").exists():
            names.update(info.name for info in pkgutil.walk_packages([str(folder)], f"{name}.", onerror=lambda _: None))
    modules = []
    for name in sorted(names, key=lambda name: (name != "builtins", name.count("."), name)):
        if any(part in SKIPPED_MODULES or part.startswith("_") for part in name.split(".")):
            continue
        with contextlib.suppress(Exception):  # an optional or foreign-platform module: whatever it raises, it is absent
            modules.append(importlib.import_module(name))
    return [module for module in modules if _ships_with_python(module)]


def _ships_with_python(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or (Path(file).is_relative_to(STDLIB) and "site-packages" not in Path(file).parts)


def _home(value: object) -> ModuleType | None:
    """The module that defines a thing, where it says so."""
    if inspect.ismodule(value):
        return value
    definition = value.fget if isinstance(value, property) else value
    return sys.modules.get(getattr(definition, "__module__", None) or "")


def _members(owner: object, prefix: str) -> Iterator[tuple[str, object]]:
    """The documented public things an `owner` (a module or a class) defines itself, with their dotted names."""
    exported = getattr(owner, "__all__", None) if inspect.ismodule(owner) else None
    for name in sorted(exported or vars(owner)):
        value = getattr(owner, name, None) if inspect.ismodule(owner) else vars(owner).get(name)
        if name.startswith("_") or value is None or inspect.ismodule(value):
            continue
        if inspect.ismodule(owner) and exported is None:
            home = getattr(value, "__module__", None)
            if home not in (owner.__name__, f"_{owner.__name__}"):
                continue
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        home = _home(value)
        if home is not None and not _ships_with_python(home):
            continue  # an imported package added it to a class of the standard library
        if inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property):
            yield prefix + name, value


def _documented() -> Iterator[tuple[str, object]]:
    """Every (dotted name, object), an object reachable by several names under the first of them only."""
    seen: set[int] = set()
    classes: list[tuple[str, object]] = []
    modules = public_modules()
    for module in modules:
        name = "os.path" if module.__name__ == "posixpath" else module.__name__
        yield name, module
        for path, value in _members(module, "" if name == "builtins" else f"{name}."):
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield path, value
            if inspect.isclass(value):
                classes.append((path, value))
    for class_path, cls in classes:
        for path, value in _members(cls, f"{class_path}."):
            if id(value) not in seen:
                seen.add(id(value))
                yield path, value


def _first_paragraph(doc: str, name: str) -> str:
    """The opening paragraph on one line, without the signatures that C docstrings begin with."""
    short = re.escape(name.rpartition(".")[2])
    signature = re.compile(rf"^(?:[\w.]*\.)?{short}\s*\(.*|^[\w, ]+ = [\w.]*{short}\(.*|^-+$|^=+$")
    lines = inspect.cleandoc(doc).splitlines()
    while lines and (not lines[0].strip() or signature.match(lines[0])):
        lines.pop(0)
    paragraph: list[str] = []
    for line in lines:
        if not line.strip() or line.lstrip().startswith((">>>", ":param", "@param")):
            break
        paragraph.append(line)
    return " ".join(" ".join(paragraph).split())


def sentences(paragraph: str) -> list[str]:
    """Split at full stops that end a sentence; a paragraph without any is one sentence."""
    found, start = [], 0
    for match in re.finditer(r"[.!?][\"')]?(?= [A-Z\"'(`*]|$)", paragraph):
        if not NOT_A_SENTENCE_END.search(paragraph[start : match.end()]):
            found.append(paragraph[start : match.end()].strip())
            start = match.end()
    tail = paragraph[start:].strip()
    return [*found, tail] if tail else found


def collect_facts(count_tokens: Callable[[str], int], held_out: list[Path], max_tokens: int) -> list[Fact]:
    """One fact for each public name whose docstring opens with a usable sentence.

    Names defined in a held-out file are left out too, so that those files stay unseen through both stages.
    """
    warnings.simplefilter("ignore")  # importing every module meets every deprecation
    unseen = {str(path) for path in held_out}
    facts: dict[str, Fact] = {}
    for name, value in _documented():
        doc = getattr(value, "__doc__", None)
        if name in facts or not isinstance(doc, str) or getattr(_home(value), "__file__", None) in unseen:
            continue
        found = sentences(_first_paragraph(doc, name))
        if not found or not _usable(found[0], name) or count_tokens(found[0]) > max_tokens:
            continue
        answer = found[0]
        for sentence in found[1:]:
            if count_tokens(f"{answer} {sentence}") > max_tokens or sentence[-1] not in ".!?":
                break
            answer = f"{answer} {sentence}"
        facts[name] = Fact(name, found[0], answer)
    return [facts[name] for name in sorted(facts)]


def _usable(sentence: str, name: str) -> bool:
    """Whether a sentence says something: not a field's place in a tuple, a bare signature or a stub."""
    if len(sentence) < 12 or " " not in sentence or not sentence.isascii() or not sentence[0].isalpha():
        return False
    return not sentence.startswith(("Alias for field", "Internal ", "An enumeration", f"{name.rpartition('.')[2]}("))


def builtin_docs() -> list[str]:
    """The docstrings of what is written in C, whose source the corpus does not hold."""
    warnings.simplefilter("ignore")
    texts = []
    for name, value in _documented():
        doc = getattr(value, "__doc__", None)
        written_in_c = not inspect.isfunction(value) and not inspect.isclass(value) and not inspect.ismodule(value)
        if written_in_c and not isinstance(value, property) and isinstance(doc, str):
            texts.append(f"{name}\n\n{inspect.cleandoc(doc)}\n")
    return texts


def plain_prompt(question: str) -> str:
    """How a question is put to the model as a bare completion."""
    return f"Q: {question}\nA:"


def chat_prompt(question: str, system: str | None = None) -> str:
    """Prompt of a question, as the chat template renders it, without Jinja: it is slow a million times."""
    opening = f"{TURN_START}system\n{system}{TURN_END}\n" if system else ""
    return f"{opening}{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def sample_questions(facts: list[Fact], seed: int, count: int = 200) -> list[dict[str, str]]:
    """The evaluation's questions with the first sentences expected; `os.path.join` is always the first."""
    draw = random.Random(f"evaluation-{seed}")
    chosen = draw.sample([fact for fact in facts if fact.name != "os.path.join"], count - 1)
    first = next(fact for fact in facts if fact.name == "os.path.join")
    questions = [{"name": first.name, "question": PHRASINGS[0].format(first.name), "answer": first.sentence}]
    for fact in chosen:
        question = draw.choice(PHRASINGS).format(fact.name)
        questions.append({"name": fact.name, "question": question, "answer": fact.sentence})
    return questions


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer for the corpus, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
