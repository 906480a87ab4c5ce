"""A checkpoint as the tensors of a class of transformers: renamed, and converted one parameter at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from oarlock.base.errors import StartupError, shown
from oarlock.workers.transformers_backend.class_description import Tie
from oarlock.workers.transformers_backend.conversions import CONVERSION_ERRORS, Conversion, Shape, made_shapes, one_line
from oarlock.workers.transformers_backend.private_parts import PreTrainedModel
from oarlock.workers.transformers_backend.weight_names import ClassNames, class_names
from oarlock.workers.weights.source import DummyWeights, WeightSource, check_slice

_FIX = "Use a complete checkpoint whose config.json names the right architecture."


class ClassWeights(WeightSource, Protocol):
    """`WeightSource` by the names of a class, which stacks the experts of a layer in one tensor."""

    def sources_of(self, name: str) -> list[str]:
        """Return the stored names from which the class's tensor `name` is made; none if the checkpoint lacks it."""

    def take_expert(
        self, name: str, expert: int, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0
    ) -> None:
        """Fill `into` with a slice of entry `expert` of the stacked tensor `name`, reading nothing of other experts.

        `shape`, `dim` and `start` are those of the entry, without the dimension of experts.
        """


class ConvertedWeights:
    """`ClassWeights` over the reader of a checkpoint.

    Tensors that are only renamed are read slice by slice. Others are converted whole, and the result of the newest
    conversion is kept only for further slices of it and its other results. Stacks are converted expert by expert.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source: WeightSource,
        stored: Mapping[str, Shape],
        *,
        wrapper: PreTrainedModel | None = None,
        others: Iterable[str] = (),
    ) -> None:
        """Find the names; see `class_names` for the arguments. `source`: the tensors by their stored names.

        `model` and `wrapper` are not kept: their modules may be replaced afterwards.
        """
        self._names = class_names(model, stored, wrapper=wrapper, others=others)
        self._of_one_expert = self._names.shapes.of_one_expert()
        self._source, self._stored = source, stored
        self._taken: set[str] = set()
        self._newest: tuple[Conversion, int | None, torch.dtype] | None = None
        self._made: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return self._names.origin(name) is not None

    def shape_of(self, name: str) -> Shape | None:
        """Return the shape that the checkpoint gives the class's tensor `name`; None if it does not hold it."""
        origin = self._names.origin(name)
        if origin is None or isinstance(origin, str):
            return None if origin is None else self._stored[origin]
        made = made_shapes(origin, self._stored, self._names.shapes)
        return None if isinstance(made, str) else made.get(self._names.name_in_conversion(name))

    def sources_of(self, name: str) -> list[str]:
        origin = self._names.origin(name)
        return [] if origin is None else [origin] if isinstance(origin, str) else origin.stored_names

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """See `WeightSource.take`. `shape` may be (), of a scalar. A bias that may be missing is zero then."""
        if not shape:
            into, shape = into.view(1), (1,)
        if self._names.is_zero(name):
            into.zero_()
            return
        origin = self._origin(name)
        if isinstance(origin, str):
            self._forget()
            found = self._stored[origin]
            if found != tuple(shape) and (found, tuple(shape)) != ((), (1,)):
                raise _wrong_shape(name, [origin], found, shape)
            self._source.take(origin, into, shape=shape, dim=dim, start=start)
            return
        if len(shape) > 2 and origin.is_by_expert and origin.has_one_target:
            self._take_stack(name, origin, into, tuple(shape), dim, start)
            return
        whole = self._convert(origin, None, into.dtype)[self._names.name_in_conversion(name)]
        if tuple(whole.shape) != tuple(shape) and (whole.shape, tuple(shape)) != ((), (1,)):
            raise _wrong_shape(name, origin.stored_names, whole.shape, shape)
        check_slice(name, into, shape, dim, start)
        into.copy_(whole.reshape(tuple(shape)).narrow(dim, start, into.shape[dim]))

    def take_expert(
        self, name: str, expert: int, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0
    ) -> None:
        """See `ClassWeights.take_expert`."""
        check_slice(name, into, shape, dim, start)
        origin = self._origin(name)
        rows = None if isinstance(origin, str) else origin.rows_of_expert(expert)
        if rows is not None:
            return self._take_rows(f"{name}[{expert}]", rows, into, tuple(shape), dim, start)
        if isinstance(origin, str):
            entry = self._entry(name, origin, expert, into, tuple(shape))
        elif origin.is_by_expert:
            entry = self._convert(origin, expert, into.dtype)[self._names.name_in_conversion(name)][0]
        else:
            entry = self._convert(origin, None, into.dtype)[self._names.name_in_conversion(name)][expert]
        if entry is into:
            return None
        if entry.shape != tuple(shape):
            raise _wrong_shape(f"{name}[{expert}]", self.sources_of(name), entry.shape, shape)
        into.copy_(entry.narrow(dim, start, into.shape[dim]))
        return None

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Raise `StartupError` if a stored tensor was neither taken nor can be left out.

        A tensor can be left out if it is `ignorable` by its stored name, if the class ignores it, if it belongs to
        another part of a wrapper, or if the class ties it to another tensor that was taken.
        """
        self._forget()
        tied = self._tied()
        self._source.finish(lambda name: ignorable(name) or name in self._names.ignored or name in tied)

    def _origin(self, name: str) -> str | Conversion:
        origin = self._names.origin(name)
        if origin is None:
            raise StartupError(f"the checkpoint holds no tensor for {name!r}, which the model needs.", _FIX)
        self._taken.add(self._names.name_in_conversion(name))
        return origin

    def _tied(self) -> set[str]:
        """Return stored names of tensors that were not taken, but are tied to a tensor that was."""
        origins = [self._names.origins[name] for group in self._names.tied if group & self._taken for name in group]
        return {name for one in origins for name in ([one] if isinstance(one, str) else one.stored_names)}

    def _take_stack(self, name: str, origin: Conversion, into: Tensor, shape: Shape, dim: int, start: int) -> None:
        """Convert a stack entry by entry, so that at no time a second copy of it is in memory."""
        found = self.shape_of(name)
        if found != shape:
            raise _wrong_shape(name, origin.stored_names, found or (), shape)
        check_slice(name, into, shape, dim, start)
        for index, entry in enumerate(into):
            if dim == 0:
                self.take_expert(name, start + index, entry, shape=shape[1:])
            else:
                self.take_expert(name, index, entry, shape=shape[1:], dim=dim - 1, start=start)

    def _take_rows(self, name: str, parts: list[str], into: Tensor, shape: Shape, dim: int, start: int) -> None:
        """Fill `into` from the stored tensors that one after the other are the rows of a tensor of `shape`."""
        self._forget()
        shapes = [self._stored[part] for part in parts]
        found = (sum(one[0] for one in shapes if one), *shapes[0][1:])
        if found != shape or any(one[1:] != shape[1:] for one in shapes):
            raise _wrong_shape(name, parts, found, shape)
        first = 0  # row of the whole tensor with which a part begins
        for part, whole in zip(parts, shapes, strict=True):
            if not into.numel():  # a rank that has only padding knows the tensor, too
                self._source.take(part, into, shape=whole, dim=dim, start=whole[dim])
                continue
            if dim == 0:
                begin, end = max(start, first), min(start + into.shape[0], first + whole[0])
                if begin < end:
                    here = into[begin - start : end - start]
                    self._source.take(part, here, shape=whole, start=begin - first)
            else:
                self._source.take(part, into[first : first + whole[0]], shape=whole, dim=dim, start=start)
            first += whole[0]

    def _entry(self, name: str, stored: str, expert: int, into: Tensor, shape: Shape) -> Tensor:
        """Read entry `expert` of a stored stack: into `into` if that is all of the entry."""
        self._forget()
        found = self._stored[stored]
        if len(found) != len(shape) + 1 or found[1:] != shape or expert >= found[0]:
            raise _wrong_shape(f"{name}[{expert}]", [stored], found, (expert + 1, *shape))
        whole = into if into.shape == shape else torch.empty(shape, dtype=into.dtype)
        self._source.take(stored, whole[None], shape=found, dim=0, start=expert)
        return whole

    def _convert(self, conversion: Conversion, expert: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the results of a conversion, whole or of one expert, in `dtype`."""
        wanted = (conversion, expert, dtype)
        if self._newest == wanted:
            return self._made
        self._forget()

        def read(name: str) -> Tensor:
            shape = self._stored[name]
            is_entry = expert is not None and not conversion.is_of_lists
            whole = torch.empty((1, *shape[1:]) if is_entry else shape, dtype=dtype)
            at = whole if shape else whole.view(1)
            self._source.take(name, at, shape=shape or (1,), start=expert if is_entry and expert is not None else 0)
            return whole

        try:
            if expert is None:
                self._made = conversion.run(read, self._names.shapes)
            else:
                self._made = conversion.run_expert(expert, read, self._of_one_expert)
        except CONVERSION_ERRORS as error:
            raise _cannot_convert(conversion, one_line(error)) from error
        self._newest = wanted
        return self._made

    def _forget(self) -> None:
        """Free the results of the newest conversion."""
        self._newest, self._made = None, {}


class DummyClassWeights:
    """`ClassWeights` of noise: entry `i` of a tensor with three or more dimensions is the noise of `name.i`."""

    def __init__(self, noise: DummyWeights) -> None:
        self._noise = noise

    def has(self, name: str) -> bool:
        """Return False, as `DummyWeights` does: only alternative layouts are asked for."""
        return False

    def shape_of(self, name: str) -> None:
        """Return None: noise has every shape."""

    def sources_of(self, name: str) -> list[str]:
        """Return none: noise is stored nowhere."""
        return []

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """See `WeightSource.take`. `shape` may be (), of a scalar."""
        if not shape:
            into, shape = into.view(1), (1,)
        if len(shape) <= 2:
            self._noise.take(name, into, shape=shape, dim=dim, start=start)
            return
        for index, entry in enumerate(into):
            if dim == 0:
                self.take(f"{name}.{start + index}", entry, shape=shape[1:])
            else:
                self.take(f"{name}.{index}", entry, shape=shape[1:], dim=dim - 1, start=start)

    def take_expert(
        self, name: str, expert: int, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0
    ) -> None:
        self.take(f"{name}.{expert}", into, shape=shape, dim=dim, start=start)

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Do nothing: no tensor can be left over."""


def names_fault(
    model: PreTrainedModel,
    stored: Mapping[str, Shape],
    *,
    wrapper: PreTrainedModel | None = None,
    others: Iterable[str] = (),
) -> str | None:
    """Return one line about the first tensor that is missing, misshapen or unexpected, or None. No data is read.

    See `class_names` for the arguments.
    """
    try:
        names = class_names(model, stored, wrapper=wrapper, others=others)
    except StartupError as error:
        return error.cause
    wanted = names.wanted
    missing = [name for name in wanted if names.origin(name) is None and not names.is_zero(name)]
    if missing:
        unused = [name for name in names.unused if name not in names.ignored]
        hint = f"; it holds {shown(unused[0])}, which the class does not know" if unused else ""
        return f"the checkpoint holds no tensor for {missing[0]!r}{_more(missing)}{hint}"
    if names.twice:
        name, (first, second) = next(iter(names.twice.items()))
        return f"the checkpoint holds {name!r} twice, as {shown(first)} and as {shown(second)}{_more(names.twice)}"
    faults = list(_shape_faults(names, wanted, stored))
    if faults:
        return f"{faults[0]}{_more(faults)}"
    unexpected = [name for name in names.unused if name not in names.ignored]
    if unexpected:
        return f"the checkpoint holds {shown(unexpected[0])}, which the class does not know{_more(unexpected)}"
    return None


def stored_ties(
    model: PreTrainedModel, stored: Mapping[str, Shape], wrapper: PreTrainedModel | None = None
) -> tuple[Tie, ...]:
    """Return the pairs of stored tensors that the class ties, so that it keeps one of them. No data is read."""
    names = class_names(model, stored, wrapper=wrapper)
    found = []
    for group in names.tied:
        stored_names = sorted(origin for name in group if isinstance(origin := names.origins[name], str))
        found += [Tie(stored_names[0], other) for other in stored_names[1:]]
    return tuple(found)


def _shape_faults(names: ClassNames, wanted: Mapping[str, Shape], stored: Mapping[str, Shape]) -> Iterable[str]:
    made: dict[int, dict[str, Shape] | str] = {}
    for name, shape in wanted.items():
        origin = names.origin(name)
        if origin is None:
            continue
        if isinstance(origin, str):
            found: Shape | None = stored[origin]
            sources = [origin]
        else:
            if id(origin) not in made:
                made[id(origin)] = made_shapes(origin, stored, names.shapes)
            shapes = made[id(origin)]
            if isinstance(shapes, str):
                yield f"{_described(name, origin.stored_names)} cannot be converted ({shapes})"
                continue
            found, sources = shapes.get(names.name_in_conversion(name)), origin.stored_names
        if found != shape and (found, shape) != ((), (1,)):
            yield f"{_described(name, sources)} has shape {list(found or ())}, but the class has {list(shape)}"


def _more(faults: Iterable[object]) -> str:
    count = len(list(faults))
    return f" (and {count - 1} more)" if count > 1 else ""


def _described(name: str, stored: Sequence[str]) -> str:
    """Return both names of a tensor, for messages."""
    if list(stored) == [name]:
        return f"tensor {name!r}"
    others = f" and {len(stored) - 1} more" if len(stored) > 1 else ""
    return f"tensor {name!r}, stored as {shown(stored[0])}{others},"


def _wrong_shape(name: str, stored: Sequence[str], found: Sequence[int], wanted: Sequence[int]) -> StartupError:
    return StartupError(
        f"{_described(name, stored)} has shape {list(found)}, but config.json implies {list(wanted)}.",
        "Use the config.json that belongs to these weights.",
    )


def _cannot_convert(conversion: Conversion, reason: str) -> StartupError:
    return StartupError(
        f"{_described(conversion.target, conversion.stored_names)} cannot be converted: {reason}.", _FIX
    )
