"""transformers' side of a verification: its greedy text, its tensors, and how far each is from the float64 truth.

`python -m workers.verify.reference FOLDER PARENT_PID` reads `request.json` there and leaves, for the ranks that come
after it, `text.json` (token ids), `truth-*.safetensors` (every tensor in float64, kept in float32 where the model's
dtype is coarser), and `theirs-*.safetensors` (per column: the largest error of transformers' own run, and the sum of
squares).
A process of its own, so that all its memory is free again when our ranks start. Knows nothing of ranks or verdicts.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from workers.layers.decoder_spec import DecoderSpec
from workers.preflight import read_spec
from workers.verify.exact import in_float64
from workers.verify.hooks import Recording
from workers.verify.names import LAYER
from workers.verify.request import Request, Text
from workers.worker.worker_process import die_with_parent

Say = Callable[[str], None]


def record_reference(request: Request, folder: Path, say: Say) -> Text:
    """Run transformers as `request` says and leave its tensors in `folder`."""
    if request.num_threads:
        torch.set_num_threads(request.num_threads)
    say(f"transformers: loading {request.model} in {request.dtype}")
    model = load_model(request.model, request.dtype, request.device)
    with torch.inference_mode():
        text = generate(model, request, say)
        text.write(folder)
        if request.record:
            _record(model, read_spec(request.model), text, request, folder, say)
    return text


def load_model(path: str, dtype: str, device: str) -> PreTrainedModel:
    """The model as a user of transformers gets it, in evaluation mode."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    return model.to("cuda:0" if device == "cuda" else "cpu").eval()


def generate(model: PreTrainedModel, request: Request, say: Say) -> Text:
    """Greedy text by transformers' own `generate`, whatever tokens come."""
    outputs = []
    for number, prompt in enumerate(request.prompts):
        if request.new_tokens == 0:
            outputs.append([])
            continue
        say(f"transformers: greedy text {number + 1} of {len(request.prompts)}")
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(  # ty: ignore[not-callable]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, repetition_penalty=1.0,
            max_new_tokens=request.new_tokens, min_new_tokens=0, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return Text(request.prompts, outputs)


def _record(model: PreTrainedModel, spec: DecoderSpec, text: Text, request: Request, folder: Path, say: Say) -> None:
    exact_kept = torch.float64 if request.dtype == "float32" else torch.float32
    say(f"transformers: every layer in {request.dtype}")
    own = _run(model, spec, text, getattr(torch, request.dtype))
    say("transformers: every layer in float64")
    with in_float64(model):
        truth = _run(model, spec, text, exact_kept)
    say("transformers: writing its tensors")
    for file, names in _files(spec.num_layers):
        here = {name: truth[name] for name in names}
        errors = {}
        for name, exact in here.items():
            error = (own.pop(name).double() - exact.double()).abs()
            errors[f"{name}.max"] = error.amax(0)
            errors[f"{name}.square"] = error.square().sum(0)
        save_file(here, folder / f"truth-{file}.safetensors")
        save_file(errors, folder / f"theirs-{file}.safetensors")


def _run(model: PreTrainedModel, spec: DecoderSpec, text: Text, keep: torch.dtype) -> dict[str, Tensor]:
    """All sequences, one after the other, each in one call: every tensor as [T, columns]."""
    recording = Recording(model, spec, keep)
    try:
        for sequence in text.fed():
            answer = model(torch.tensor([sequence], device=model.device), use_cache=False)
            recording.record("logits", answer.logits)
        return recording.tensors()
    finally:
        recording.close()


def _files(num_layers: int) -> Iterator[tuple[str, list[str]]]:
    """Which tensors lie together: one file per layer, so that nobody need hold more than one."""
    for layer in range(num_layers):
        yield str(layer), [f"{layer}.{tensor}" for tensor in (*LAYER, "gate")]
    yield "ends", ["embedding", "final_norm", "logits"]


def main(argv: list[str]) -> int:
    folder, parent_pid = Path(argv[0]), int(argv[1])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    request = Request.read(folder)
    record_reference(request, folder, lambda line: print(f"verify: {line}", file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
