"""The stored tensors from which each tensor of a class is made, found from names and shapes without reading data.

It follows the names through the same steps as transformers' `from_pretrained`: renamings, then at most one converter,
then the prefix of the base model, which the checkpoint may have or not.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from oarlock.workers.transformers_backend.conversions import Conversion, Shape, ShapesOfClass, made_shapes
from oarlock.workers.transformers_backend.private_parts import (
    PreTrainedModel,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
)
from oarlock.workers.transformers_backend.text_parts import names_inside

# A stored name, if the tensor is as the class has it; otherwise the conversion that makes it.
Origin = str | Conversion


@dataclass(slots=True)
class ClassNames:
    """Where the tensors of a class come from."""

    shapes: ShapesOfClass  # of the tensors of the class whose checkpoint it is
    origins: dict[str, Origin] = field(default_factory=dict)  # by the class's names
    aliases: dict[str, str] = field(default_factory=dict)  # tied tensors -> the tensor that is stored
    unused: dict[str, str] = field(default_factory=dict)  # stored names without a tensor -> the name it would have
    twice: dict[str, tuple[str, str]] = field(default_factory=dict)  # class's name -> two stored names of it
    ignored: set[str] = field(default_factory=set)  # stored names that the class or its wrapper does not need
    optional: set[str] = field(default_factory=set)  # class's names of biases that may be missing
    tied: list[set[str]] = field(default_factory=list)  # stored tensors of the class that it ties to each other
    inside: dict[str, str] | None = None  # the class's names -> names in its wrapper; None: there is none
    text_prefix: str = ""  # beginning of the names of the text part in its wrapper

    def origin(self, name: str) -> Origin | None:
        """Return the origin of the class's tensor `name`; None if the checkpoint lacks it."""
        if self.inside is not None:
            name = self.inside.get(name, name)
        return self.origins.get(name) or self.origins.get(self.aliases.get(name, name))

    def is_zero(self, name: str) -> bool:
        """Return whether the class's tensor `name` is a bias that may be missing, and is."""
        return self.origin(name) is None and self.name_in_conversion(name) in self.optional

    def name_in_conversion(self, name: str) -> str:
        """Return the name that conversions give to the class's tensor `name`."""
        if self.inside is not None:
            name = self.inside.get(name, name)
        return name if name in self.origins else self.aliases.get(name, name)

    @property
    def wanted(self) -> Mapping[str, Shape]:
        """The tensors of the class that is served, by its names."""
        if self.inside is None:
            return self.shapes.tensors
        return {name: self.shapes.tensors.get(inner, ()) for name, inner in self.inside.items()}


def class_names(
    model: PreTrainedModel,
    stored: Mapping[str, Shape],
    *,
    wrapper: PreTrainedModel | None = None,
    others: Iterable[str] = (),
) -> ClassNames:
    """Return where the tensors of `model` come from, a class on the meta device with its own modules and whole shapes.

    `stored`: shapes of the checkpoint's tensors by name. `wrapper`: the multimodal model on the meta device whose
    checkpoint it is, if `model` is only its text part. `others`: beginnings of stored names of parts not served.
    """
    source = model if wrapper is None else wrapper
    tensors = source.state_dict(keep_vars=True)
    names = ClassNames(ShapesOfClass(source.config, {name: tuple(one.shape) for name, one in tensors.items()}))
    if wrapper is not None:
        names.text_prefix, names.inside = names_inside(model, wrapper)
    _collect(names, source, tensors, stored)
    _find_tied(names, source, tensors)
    _sort_out(names, source, tuple(others))
    return names


def _collect(
    names: ClassNames, model: PreTrainedModel, tensors: Mapping[str, Tensor], stored: Mapping[str, Shape]
) -> None:
    """Follow every stored name, in the order of transformers: some renamings depend on names before."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix
    known = dict(tensors)
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=known)
        if renamed not in known:
            names.unused[name] = renamed
        elif pattern is None:
            other = names.origins.setdefault(renamed, name)
            if other is not name:
                names.twice[renamed] = (other if isinstance(other, str) else other.stored_names[0], name)
        else:
            found = names.origins.setdefault(renamed, Conversion(by_pattern[pattern], renamed, {}))
            if isinstance(found, str):
                names.twice[renamed] = (found, name)
            else:
                found.sources.setdefault(pattern, []).append(name)
    for origin in list(names.origins.values()):
        if isinstance(origin, Conversion) and not origin.has_one_target:
            for target in _targets(origin, stored, names.shapes):
                names.origins.setdefault(target, origin)


def _targets(conversion: Conversion, stored: Mapping[str, Shape], shapes: ShapesOfClass) -> Iterator[str]:
    made = made_shapes(conversion, stored, shapes)
    if not isinstance(made, str):
        yield from made


def _find_tied(names: ClassNames, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Find tied tensors, and for each that is not stored the stored tensor."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    for name, other in model.all_tied_weights_keys.items():
        if name in tensors and other in tensors:
            joined = groups[id(tensors[name])] | groups[id(tensors[other])]
            groups |= {id(tensors[one]): joined for one in joined}
    for group in groups.values():
        stored = sorted(name for name in group if name in names.origins)
        if stored:
            names.aliases |= {name: stored[0] for name in group if name not in names.origins}
        if len(stored) > 1:
            names.tied.append(set(stored))


def _sort_out(names: ClassNames, model: PreTrainedModel, others: tuple[str, ...]) -> None:
    """Mark the stored names that nothing needs, and the tensors of the class that may be missing."""
    needless = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        needless.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        needless.add(r"(^|\.)position_ids$")
    is_needless = _matcher(needless)
    names.ignored = {name for name, renamed in names.unused.items() if is_needless(renamed) or _begins(name, others)}
    may_be_missing = _matcher(model._keys_to_ignore_on_load_missing or ())
    names.optional = {name for name in names.shapes.tensors if name.endswith("bias") and may_be_missing(name)}
    if names.inside is None:
        return
    served = {names.aliases.get(name, name) for name in names.inside.values()}
    served = {id(names.origins[name]) for name in served if name in names.origins}
    for origin in names.origins.values():
        if id(origin) not in served:
            names.ignored.update([origin] if isinstance(origin, str) else origin.stored_names)
    names.ignored |= {name for name, renamed in names.unused.items() if not renamed.startswith(names.text_prefix)}


def _begins(name: str, beginnings: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(one if one.endswith(".") else f"{one}.") for one in beginnings)


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that finds out whether a name matches any of the regular expressions."""
    together = "|".join(f"({pattern})" for pattern in patterns)
    expression = re.compile(together) if together else None
    return lambda name: expression is not None and expression.search(name) is not None
