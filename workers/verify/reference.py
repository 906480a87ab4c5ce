"""transformers' side of a verification: its greedy text, its tensors, and their distance from the float64 truth.

`python -m oarlock.workers.verify.reference FOLDER PARENT_PID CONTROL_FD` reads `request.json` in FOLDER and writes
  text.json              the token ids that the ranks are fed
  truth-*.safetensors    every tensor in float64, stored in float32 if the model's dtype is coarser
  theirs-*.safetensors   per column, the largest error of transformers' own run and the sum of squared errors
  near-ties.json         if it follows our choices of experts: their number
It is a process of its own, so that all its memory is free again when our ranks start.
"""

import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Emu3ForCausalLM,
    Emu3TextConfig,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.utils import logging as transformers_logging

from oarlock.base.python_child import die_with_parent
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, SublayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.memory_spec import SlotsSpec
from oarlock.workers.layers.tensor_spec import Computation, Tap
from oarlock.workers.model_files.gguf_model import gguf_file
from oarlock.workers.model_files.tensor_names import Blocks, TensorNames
from oarlock.workers.models.registry import read_spec
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.verify.compare import file_of, taps_of
from oarlock.workers.verify.dequantised_reference import (
    DequantisedModel,
    LayerLoss,
    RoundingLoss,
    WrittenOut,
    dequantised_weights,
    is_experts,
    is_product,
)
from oarlock.workers.verify.exact_modules import Widened, exact_attention, in_float64
from oarlock.workers.verify.expert_choices import ExpertChoices, choices_of_ranks, routing_in
from oarlock.workers.verify.merged_reference import MergedModel
from oarlock.workers.verify.request import Text, VerifyRequest
from oarlock.workers.verify.transformers_layout import TransformersLayout

# A text model that transformers saves with settings that its automatic class does not know.
AutoModelForCausalLM.register(Emu3TextConfig, Emu3ForCausalLM, exist_ok=True)

# MoE layers that scale the sum of a token's experts, where others, and we, scale the weights of experts.
_SCALE_EXPERTS = ("LagunaSparseMoeBlock",)

ReportLine = Callable[[str], None]
Weights = Callable[[int], AbstractContextManager[None]]  # the weights to run a sequence with, by its number


def record_reference(request: VerifyRequest, folder: Path, report_line: ReportLine) -> Text:
    """Run transformers on `request` and write its text and tensors to `folder`."""
    if request.num_threads:
        torch.set_num_threads(request.num_threads)
    report_line(f"loading {request.model} in {request.dtype}")
    spec, dtype = read_spec(request.model), getattr(torch, request.dtype)
    model, quantised = load_for(request, dtype)
    as_served = quantised.as_served if quantised else nullcontext
    with torch.inference_mode():
        keep = torch.float64 if request.dtype == "float32" else torch.float32
        rounded, exact = adapted_weights(model, spec, request, keep, is_quantised=quantised is not None)
        if request.follows_choices:
            text = Text.read(folder)
        else:
            with as_served():
                text = generate(model, spec, request, report_line, rounded)
            text.write(folder)
        if not request.record:
            return text
        report_line("every layer in float64")
        ours = choices_of_ranks(folder, spec) if request.follows_choices else {}
        choices = ExpertChoices(ours) if ours else None
        with in_float64(model, spec.names):
            truth = _run(model, spec, text, keep, choices, exact)
        if choices is not None:
            choices.write(folder)
        report_line(f"every layer in {request.dtype}")
        with as_served():
            theirs = _run(model, spec, text, dtype, ExpertChoices(truth, *([ours] if ours else [])), rounded)
        report_line("writing its tensors")
        _write(truth, theirs, folder)
        if quantised and quantised.was_dense:
            report_line("every layer in float64, with the weights as they are stored")
            with quantised.as_it_was(), in_float64(model, spec.names):
                before = _run(model, spec, text, torch.float64, weights=exact)
            _loss(quantised.errors(_parameters_by_layer(model, spec)), truth, before).write(folder)
    return text


def _own_weights(sequence: int) -> AbstractContextManager[None]:
    """Run every sequence with the weights of the model."""
    return nullcontext()


def adapted_weights(
    model: PreTrainedModel, spec: DecoderSpec, request: VerifyRequest, wide: torch.dtype, *, is_quantised: bool
) -> tuple[Weights, Weights]:
    """Return the weights of each sequence in the dtype of the model, and in `wide` for the truth."""
    if request.adapter is None:
        return _own_weights, _own_weights
    merged = MergedModel(model, spec, Path(request.adapter), is_quantised=is_quantised)

    def weights(dtype: torch.dtype | None) -> Weights:
        return lambda sequence: merged.weights(dtype) if request.is_adapted(sequence) else nullcontext()

    return weights(None), weights(wide)


def load_for(request: VerifyRequest, dtype: torch.dtype) -> tuple[PreTrainedModel, DequantisedModel | None]:
    """Return the model, and its `DequantisedModel`; None if weights are served in the dtype of the model."""
    path = Path(request.model)
    is_dense = gguf_file(path) is None and request.quantization in QUANTIZATIONS
    if is_dense and request.quantization == "none":
        return load_model(request.model, request.dtype, request.device), None
    dequantised = dequantised_weights(path, request.quantization, dtype)
    if request.dequantize:
        dequantised = WrittenOut(dequantised, dtype)
    names = read_spec(request.model).names
    layout = TransformersLayout(dequantised, names)
    model = (
        load_model(request.model, request.dtype, request.device) if is_dense else _unfilled_model(request.model, dtype)
    )
    unread = {name for name in names_in(model) if names.rename(name) is None}
    if not is_dense:
        linear_layers = {f"{name}.weight" for name, part in model.named_modules() if is_product(part)}
        experts = [name for name, part in model.named_modules() if is_experts(part)]
        linear_layers |= {f"{name}.{part}_proj" for name in experts for part in ("gate_up", "up", "down")}
        for name, parameter in model.named_parameters():
            if name not in linear_layers and name not in unread:
                parameter.data = layout.other(name).to(dtype)
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in stored and names.rename(name) is not None:  # corrections of routers
                buffer.copy_(layout.other(name).view_as(buffer))
    return model, DequantisedModel(model, layout, dtype, was_dense=is_dense, device=request.device, unread=unread)


def model_class(spec: DecoderSpec) -> Any:
    """Return transformers' class of the model: for a multimodal model the whole of it, which computes text alike."""
    return AutoModelForCausalLM if spec.wrapper is None else getattr(transformers, spec.wrapper)


def names_in(model: PreTrainedModel) -> list[str]:
    """Return the names of all modules and parameters."""
    return [name for of in (model.named_modules(), model.named_parameters()) for name, _ in of]


def text_part(model: PreTrainedModel, spec: DecoderSpec) -> PreTrainedModel:
    """Remove the modules and parameters of a wrapper that text does not use, such as those for images."""
    if spec.wrapper is None:
        return model
    names = spec.names
    for name in (one for one in names_in(model) if names.rename(one) is None):
        above, _, last = name.rpartition(".")
        if names.rename(above) is not None:  # otherwise it is removed with the module around it
            delattr(model.get_submodule(above), last)
    return model


def _unfilled_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the architecture that config.json describes, without its weights."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    for key in ("quantization_config", "compression_config"):
        if hasattr(config, key):
            delattr(config, key)
    spec = read_spec(path)
    if spec.wrapper is not None:
        return text_part(model_class(spec)._from_config(config, dtype=dtype), spec).eval()
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def load_model(path: str, dtype: str, device: str) -> PreTrainedModel:
    """Return the model as a user of transformers gets it, in evaluation mode."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    spec = read_spec(path)
    model = model_class(spec).from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    return text_part(model, spec).to("cuda:0" if device == "cuda" else "cpu").eval()


def generate(
    model: PreTrainedModel,
    spec: DecoderSpec,
    request: VerifyRequest,
    report_line: ReportLine,
    weights: Weights = _own_weights,
) -> Text:
    """Generate greedy text with transformers' own `generate`. An end-of-sequence token does not end it.

    Recurrent models run without transformers' cache, since some of its classes compute other results with it.
    """
    has_states = any(isinstance(group.memory, SlotsSpec) for group in spec.groups)
    outputs = []
    for number, prompt in enumerate(request.prompts):
        if request.new_tokens == 0:
            outputs.append([])
            continue
        report_line(f"greedy completion {number + 1} of {len(request.prompts)}")
        ids = torch.tensor([prompt], device=model.device)
        with weights(number):
            out = model.generate(  # ty: ignore[not-callable]
                ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, repetition_penalty=1.0,
                max_new_tokens=request.new_tokens, min_new_tokens=0, pad_token_id=0, eos_token_id=None,
                use_cache=not has_states,
            )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return Text(request.prompts, outputs)


def _write(truth: dict[str, Tensor], theirs: dict[str, Tensor], folder: Path) -> None:
    """Write the truth and the errors of `theirs`, which is emptied."""
    files: dict[str, list[str]] = {}
    for name in truth:
        files.setdefault(file_of(name), []).append(name)
    for file, names in files.items():
        exact = {name: truth[name] for name in names}
        errors = {}
        for name in names:
            found = theirs.pop(name)
            error = (found.double() - exact[name].double()).abs()
            errors[f"{name}.max"] = error.amax(0)
            errors[f"{name}.square"] = error.square().sum(0)
            if name == "logits":
                errors[f"{name}.best"] = found.argmax(1)
        save_file(exact, folder / f"truth-{file}.safetensors")
        save_file(errors, folder / f"theirs-{file}.safetensors")


def _loss(weights: Iterable[float], rounded: dict[str, Tensor], before: dict[str, Tensor]) -> RoundingLoss:
    """Return the loss. `weights`: by layer, from `DequantisedModel.errors`. Tensors by name, with and without
    rounding."""

    def distance(name: str) -> float:
        return ((rounded[name].double() - before[name]).norm() / before[name].norm()).item()

    layers = [LayerLoss(layer, error, distance(f"{layer}.residual")) for layer, error in enumerate(weights)]
    return RoundingLoss(layers, distance("logits"))


def _run(
    model: PreTrainedModel,
    spec: DecoderSpec,
    text: Text,
    keep: torch.dtype,
    choices: ExpertChoices | None = None,
    weights: Weights = _own_weights,
) -> dict[str, Tensor]:
    """Run all sequences, one after the other, each in one call. Return every tensor as [T, columns]. `choices`: of
    experts, to follow. `weights`: of each sequence."""
    recorder = TransformersRecorder(model, spec, keep, choices)
    try:
        for number, sequence in enumerate(text.inputs()):
            with weights(number):
                output = model(torch.tensor([sequence], device=model.device), use_cache=False)
            recorder.record("logits", output.logits)
        return recorder.tensors()
    finally:
        recorder.close()


def _is_of_function(tap: Tap) -> bool:
    """Return whether `tap` is an argument or a result of a function in transformers, instead of a module's."""
    return tap.computation is Computation.ROTATION or (tap.computation is Computation.CONVOLUTION and not tap.is_input)


def _rotated_part(module: nn.Module, rows: Tensor, latent: LatentAttentionSpec) -> Tensor:
    """Return the rotated elements of queries or keys [..., nope_width + rope_width], in our order.

    Most classes of transformers gather the first elements of all pairs before they rotate neighbours.
    """
    rotated = rows[..., latent.nope_width :]
    gathers = hasattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb_interleave")
    if latent.rope is None or not latent.rope.interleaved or not gathers:
        return rotated
    return rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _parameters_by_layer(model: nn.Module, spec: DecoderSpec) -> list[list[nn.Parameter]]:
    """Return the parameters of each of our layers. A layer of transformers may be several of ours."""
    found: list[list[nn.Parameter]] = [[] for _ in range(spec.num_layers)]
    for name, parameter in model.named_parameters():
        number = (spec.names.rename(name) or "").removeprefix("model.layers.").partition(".")[0]
        if number.isdecimal():
            found[int(number)].append(parameter)
    return found


def modules_by_name(model: nn.Module, names: TensorNames) -> dict[str, nn.Module]:
    """Return the modules of a transformers model by the names that our modules have."""
    renamed = ((names.rename(name), module) for name, module in model.named_modules())
    return {name: module for name, module in renamed if name is not None}


class TransformersRecorder:
    """Hooks on a transformers model that keep all tensors of `compare.taps_of`, and the tensors before and after the
    layers, as [T, columns].

    Several calls of the model are concatenated along T. `q_rope` and `k_rope` are taken from the arguments of the
    attention function, which is registered again under another name.
    """

    def __init__(
        self, model: PreTrainedModel, spec: DecoderSpec, keep: torch.dtype, choices: ExpertChoices | None = None
    ) -> None:
        """Install the hooks. `keep`: the dtype to keep tensors in. `choices`: of experts, which the model follows."""
        self._spec = spec
        self._choices = choices
        self._is_recording = True
        self._model = model
        self._keep = keep
        self._parts: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []
        self._replaced: list[Any] = []  # modules of attention with a function of their own
        self._convolving: list[tuple[str, int]] = []  # tensors of the running module's convolution, and their widths
        self._convolutions: dict[Any, Any] = {}  # Python module -> its function `causal_conv1d_fn`
        self._usual_attention = usual = model.config._attn_implementation
        self._modules = modules_by_name(model, spec.names)
        self._after(self._modules["model.norm"], "final_norm")
        # Layers that are the first part of a layer of transformers are no modules there.
        self._before(self._modules.get("model.layers.0") or self._first_of_layer(0), "embedding")
        for index in range(spec.num_layers):
            self._hook_layer(index)
            self._replace_own_attention(index)
        name = f"oarlock_{usual}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, sdpa_mask if usual == "sdpa" else eager_mask)
        model.set_attn_implementation(name)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that were recorded since the last call."""
        joined = {name: torch.cat(parts) for name, parts in self._parts.items()}
        self._parts = {}
        return joined

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for module in self._replaced:
            del module._attn
        for home, usual in self._convolutions.items():
            home.causal_conv1d_fn = usual
        self._model.set_attn_implementation(self._usual_attention)

    def record(self, name: str, value: Tensor) -> None:
        """Record `value` [1, T, ...], or [T, columns]."""
        if not self._is_recording:
            return
        rows = value.detach() if value.dim() == 2 else value.detach()[0]
        self._parts.setdefault(name, []).append(rows.reshape(rows.shape[0], -1).to(self._keep, copy=True).cpu())

    def _hook_layer(self, index: int) -> None:
        shape, layer = self._spec.layers[index], f"model.layers.{index}"
        for number, one in enumerate(taps := taps_of(shape)):
            name, branch = f"{index}.{one.tap.name}", one.branch
            if one.tap.computation is Computation.NORM and one.tap in branch.sublayer.taps:
                self._hook_sublayer(name, f"{layer}.{branch.sublayer.module}", branch.sublayer, one.tap)
            elif one.tap.computation is Computation.NORM:
                self._after(self._modules[f"{layer}.{one.tap.module}"], name)
            elif one.tap.computation is Computation.RESIDUAL:
                if number == len(taps) - 1 and layer not in self._modules:
                    self._before(self._first_of_layer(index + 1), name)
                elif number == len(taps) - 1:
                    self._after(self._modules[layer], name)
                else:
                    self._before(self._first_module(layer, taps[number + 1].branch), name)
            elif isinstance(branch.sublayer, ExpertsSpec):
                self._hook_experts(name, layer, branch.sublayer, one.tap)
            elif not _is_of_function(one.tap):
                self._hook_sublayer(name, f"{layer}.{branch.sublayer.module}", branch.sublayer, one.tap)
        for sublayer in (branch.sublayer for branch in shape.branches):
            taps = [tap for tap in sublayer.taps if tap.computation is Computation.CONVOLUTION and _is_of_function(tap)]
            if taps:
                parts = [(f"{index}.{tap.name}", tap.width) for tap in taps]
                self._hook_convolution(self._modules[f"{layer}.{sublayer.module}"], parts)

    def _first_of_layer(self, index: int) -> nn.Module:
        """Return the module that reads the residual first in a layer."""
        return self._first_module(f"model.layers.{index}", self._spec.layers[index].branches[0])

    def _first_module(self, layer: str, branch: BranchSpec) -> nn.Module:
        """Return the module of `layer` that reads the residual first in `branch`."""
        start = f"{layer}.{branch.norm or branch.sublayer.module}"
        if start in self._modules:
            return self._modules[start]
        of_sublayer = branch.sublayer.tensors(self._spec.hidden_size)[0].name.removesuffix(".weight")
        return self._modules[f"{start}.{of_sublayer}"]  # transformers has no module for the whole sublayer

    def _hook_sublayer(self, name: str, module: str, spec: SublayerSpec, tap: Tap) -> None:
        """Register a hook for a tensor of the sublayer `module`, whose matmuls may be fused in transformers."""
        whole, blocks = self._stored_with(module, spec, tap)
        if blocks is not None:
            self._after(self._modules[f"{module}.{whole}"], name, blocks.rows_of(tap.module))
        elif tap.is_input:
            self._before(self._modules[f"{module}.{whole}"], name, tap.width, tap.factor)
        else:
            self._after(self._modules[f"{module}.{whole}"], name, factor=tap.factor)

    def _stored_with(self, module: str, spec: SublayerSpec, tap: Tap) -> tuple[str, Blocks | None]:
        """Return transformers' module in the sublayer `module` that computes `tap`, and the order of its outputs if it
        computes others as well."""
        inside = [name.removeprefix(f"{module}.") for name in self._modules if name.startswith(f"{module}.")]
        for whole in inside:
            blocks = self._spec.names.blocks_of(f"{module}.{whole}")
            if blocks is not None and tap.module in blocks.parts and not tap.is_input:
                return whole, blocks
        if tap.module in inside:
            return tap.module, None
        fused = next(whole for whole, parts in spec.fused.items() if tap.module in parts)
        rows = {tensor.name: tensor.shape[0] for tensor in spec.tensors(self._spec.hidden_size)}
        parts = spec.fused[fused]
        return fused, Blocks(parts, tuple(rows[f"{part}.weight"] for part in parts), 1)

    def _hook_convolution(self, module: nn.Module, parts: list[tuple[str, int]]) -> None:
        """Record the convolution of a recurrent module, which calls a function of its Python module. `parts`: tensors
        in the order of its channels, and their widths."""
        home: Any = sys.modules[type(module).__module__]
        if home not in self._convolutions:
            self._convolutions[home] = usual = home.causal_conv1d_fn

            def convolve(*args: Any, **named: Any) -> Tensor:
                result = usual(*args, **named)  # [1, channels, T]
                columns = result.transpose(1, 2).split([width for _, width in self._convolving], 2)
                for (name, _), found in zip(self._convolving, columns, strict=True):
                    self.record(name, found)
                return result

            home.causal_conv1d_fn = convolve

        def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._convolving = parts

        self._handles.append(module.register_forward_pre_hook(begin))

    def _hook_experts(self, name: str, layer: str, spec: ExpertsSpec, tap: Tap) -> None:
        """Register a hook for a tensor of the experts of `layer`, which may have a shared expert next to the others."""
        inside = f"{layer}.{spec.module}"
        part = self._modules.get(f"{inside}.{tap.module}") or self._modules[f"{layer}.{tap.module}"]
        if tap.computation is Computation.ROUTING:
            self._hook_choice(part, int(name.partition(".")[0]))
        if spec.weighs_inputs and tap.name != "shared":
            self._hook_weighing_experts(name, part, spec, tap)
            return
        block: Any = self._modules.get(inside)
        factor = block.routed_scaling_factor if type(block).__name__ in _SCALE_EXPERTS else 1.0
        if tap.computation is not Computation.ROUTING:
            self._after(part, name, factor=factor if tap.name == "experts" else 1.0)
            gate = spec.shared.gate if spec.shared is not None and tap.name == "shared" else None
            if gate is not None:  # called after the expert that it scales
                self._handles.append(
                    self._modules[f"{inside}.{gate}"].register_forward_hook(partial(self._scale, name))
                )
            return

        def hook(module: nn.Module, args: tuple[Any, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
            self.record(name, routing_in(result, spec.choices) * factor)

        self._handles.append(part.register_forward_hook(hook))

    def _hook_choice(self, router: nn.Module, layer: int) -> None:
        """Let the `router` of `layer` follow the choices of another run. Later hooks get the changed result."""
        choices = self._choices
        if choices is None:
            return

        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
            self._is_recording = False
            try:
                return choices.follow(layer, module, args, named, result)
            finally:
                self._is_recording = True

        self._handles.append(router.register_forward_hook(hook, with_kwargs=True))

    def _hook_weighing_experts(self, name: str, part: nn.Module, spec: ExpertsSpec, tap: Tap) -> None:
        """Register a hook for experts that get every token times its weight (Llama 4), or for their router, which
        returns the weights of all experts, then the logits."""

        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            if tap.computation is Computation.EXPERTS:
                self.record(name, result.view(spec.experts, -1, result.shape[-1]).sum(0))
            else:
                self.record(name, result[tap.computation is Computation.LOGITS])

        self._handles.append(part.register_forward_hook(hook))

    def _scale(self, name: str, module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
        """Scale the newest rows of `name` by the sigmoid of `result` [T, 1]."""
        newest = self._parts[name].pop()
        self.record(name, newest.to(result.device) * torch.sigmoid(result.to(newest.dtype)))

    def _before(self, module: nn.Module, name: str, width: int = 0, factor: float = 1.0) -> None:
        """Record the first argument of `module`. `width`: values per token, if it may have a row for each head."""

        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            value = args[0] if args else named["hidden_states"]
            value = value.reshape(-1, width) if width and value.shape[-1] != width else value
            self.record(name, value if factor == 1.0 else value * factor)

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(
        self, module: nn.Module, name: str, columns: list[int] | slice = slice(None), factor: float = 1.0
    ) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            found = (result[0] if isinstance(result, tuple) else result)[..., columns]
            self.record(name, found if factor == 1.0 else found * factor)

        self._handles.append(module.register_forward_hook(hook))

    def _replace_own_attention(self, index: int) -> None:
        """Record the queries and keys of a layer that computes attention in its own method `_attn`, in float32: older
        families of transformers call no attention function. In float64 the method computes in float64."""
        module: Any = self._modules.get(f"model.layers.{index}.self_attn")  # None: the layer has no attention
        usual = getattr(module, "_attn", None)
        if usual is None:
            return

        def attend(query: Tensor, key: Tensor, *others: Any, **named: Any) -> Any:
            self.record(f"{index}.q_rope", query.transpose(1, 2))
            self.record(f"{index}.k_rope", key.transpose(1, 2))
            with Widened() if query.dtype == torch.float64 else nullcontext():
                return usual(query, key, *others, **named)

        module._attn = attend
        self._replaced.append(module)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        """Call the model's usual attention, or `exact_attention` in float64; `query` [1, H, T, D]."""
        rows, keys = query.transpose(1, 2), key.transpose(1, 2)
        attention = self._spec.layers[module.layer_idx].attention
        if isinstance(attention, LatentAttentionSpec):
            rows, keys = (_rotated_part(module, one, attention) for one in (rows, keys[:, :, 0]))
            rows = rows / attention.query_factor  # scores get it here
        elif named.get("scaling") == 1.0:  # OPT has scaled its queries already
            rows = rows / attention.scale
        key_scale = attention.key_scale if isinstance(attention, SelfAttentionSpec) else 1.0  # scores get it here
        self.record(f"{module.layer_idx}.q_rope", rows)
        self.record(f"{module.layer_idx}.k_rope", keys / key_scale)
        if query.dtype == torch.float64:
            scale = named.get("scaling") or query.shape[-1] ** -0.5
            exact = exact_attention(query, key, value, attention_mask, scale, named.get("softcap"), named.get("s_aux"))
            return exact, None
        if self._usual_attention == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = AttentionInterface()[self._usual_attention]
        return function(module, query, key, value, attention_mask, **named)[0], None


def main(argv: list[str]) -> int:
    folder, parent_pid, control = Path(argv[0]), int(argv[1]), Control.from_fd(int(argv[2]))
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    request = VerifyRequest.read(folder)
    record_reference(request, folder, lambda line: control.send("progress", text=line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
