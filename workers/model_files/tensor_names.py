"""Names of a checkpoint's tensors as a table for each family, and the names that the layers use. Torch-free.

A family whose checkpoints differ from ours in nothing but names and layouts needs only such a table on its page.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.expert_tensors import experts_by_inputs
from oarlock.workers.model_files.located import LocatedTensor

_FLOATS = ("BF16", "F16", "F32", "F64")  # names of dtypes in safetensors files of weights that are not quantised
_SCALES = ("weight_scale", "weight_scale_inv", "input_scale")  # of matrices in float8


@dataclass(frozen=True, slots=True)
class Blocks:
    """Order of the rows of one stored matrix that holds the rows of several modules.

    The matrix consists of `groups` equal groups. Each group has the rows of one module after the other, `rows[i]` rows
    of module i: GPT-NeoX stores q, k and v of a head, then those of the next head.
    """

    parts: tuple[str, ...]  # modules next to the stored module, such as `q_proj`
    rows: tuple[int, ...]
    groups: int

    def rows_of(self, part: str) -> list[int]:
        """Return the rows of the stored matrix that belong to the module `part`."""
        place, step = self.parts.index(part), sum(self.rows)
        first = sum(self.rows[:place])
        return [group * step + first + row for group in range(self.groups) for row in range(self.rows[place])]

    def split(self, whole: str, located: LocatedTensor) -> Iterator[tuple[str, LocatedTensor]]:
        """Yield each part of `whole`, a tensor of the stored module with a row for each output, under its own name.

        Scales of a matrix in float8 have a row for each output or for each block of outputs, or there is one for all.
        """
        shape, step = located.entry.shape, sum(self.rows)
        module, _, kind = whole.rpartition(".")
        above, first = module.rpartition(".")[0], 0
        if kind in _SCALES and shape in ((), (1,)):
            yield from ((f"{above}.{part}.{kind}", located) for part in self.parts)
            return
        block = self._rows_of_block(located, kind)
        if block is None:
            raise self._cannot_split(whole, located)
        for part, rows in zip(self.parts, self.rows, strict=True):
            yield f"{above}.{part}.{kind}", located.every(step // block, first // block, rows // block)
            first += rows

    def _rows_of_block(self, located: LocatedTensor, kind: str) -> int | None:
        """Return the outputs that share a row of a tensor; None if the tensor cannot be split."""
        shape, total = located.entry.shape, sum(self.rows) * self.groups
        if not shape or kind not in ("weight", "bias", *_SCALES):
            return None
        block = total // shape[0] if kind in _SCALES and shape[0] else 1
        return block if shape[0] * block == total and all(rows % block == 0 for rows in self.rows) else None

    def _cannot_split(self, whole: str, located: LocatedTensor) -> StartupError:
        if located.entry.dtype not in _FLOATS or whole.rpartition(".")[2] not in ("weight", "bias"):
            return StartupError(
                f"{located.path}: tensor {whole!r} is of a quantised matrix whose rows are those of "
                f"{', '.join(self.parts)} in turn, which is not supported.",
                "Use the model's unquantised checkpoint, and --quantization int8 or int4.",
            )
        wanted = f"{self.groups} groups of {sum(self.rows)}"
        return StartupError(
            f"{located.path}: tensor {whole!r} has shape {list(located.entry.shape)}, but config.json implies {wanted} "
            "rows.",
            "Use the config.json that belongs to these weights.",
        )


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Table from the names of a family's checkpoints to the names of our modules.

    An entry is the beginning of a name, up to a dot or the end of the name: usually a module. A star is any number, of
    a layer or an expert. The longest entry that matches counts, and a name without an entry stays as it is.
    """

    # Whole beginnings, replaced before the table is used.
    prefixes: Mapping[str, str] = field(default_factory=dict, hash=False)
    modules: Mapping[str, str] = field(default_factory=dict, hash=False)
    # Our modules whose matrices are stored as [inputs, outputs] if they are in floating point of 16 bits or more, and
    # our names of tensors that stack such matrices.
    transposed: tuple[str, ...] = ()
    # Our name of a stored module -> the modules whose rows it holds.
    blocks: Mapping[str, Blocks] = field(default_factory=dict, hash=False)
    ignored: tuple[str, ...] = ()  # entries of tensors that nothing reads, by their stored names
    # Hidden size and width of experts that may be stored as [experts, inputs, outputs]; None: they never are.
    experts_inputs_first: tuple[int, int] | None = None
    splits_experts: bool = True  # tensors that stack all experts of a layer are read as one tensor for each expert

    def rename(self, name: str) -> str | None:
        """Return our name of the stored tensor or module `name`; None if nothing reads it."""
        if _longest(self.ignored, name) is not None:
            return None
        for prefix, ours in self.prefixes.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
                break
        found = _longest(self.modules, name)
        if found is None:
            return name
        numbers = iter([part for part in name.split(".")[: found.count(".") + 1] if part.isdigit()])
        ours = ".".join([next(numbers) if part == "*" else part for part in self.modules[found].split(".")])
        return ".".join([ours, *name.split(".")[found.count(".") + 1 :]])

    def tensors(self, stored: Mapping[str, LocatedTensor]) -> Iterator[tuple[str, str, LocatedTensor]]:
        """Yield (stored name, our name, tensor) of every tensor that is not ignored; blocks are split into parts."""
        for name, located in stored.items():
            ours = self.rename(name)
            if ours is None:
                continue
            module, _, kind = ours.rpartition(".")
            # Tools that quantise transpose such a matrix, so that theirs are stored as those of other families.
            dimensions = len(located.entry.shape)
            is_matrix = dimensions == 2 and kind == "weight" and self.is_transposed(module)
            is_stack = dimensions == 3 and self.is_transposed(ours)
            if located.entry.dtype in _FLOATS and (is_matrix or is_stack):
                located = located.transpose()
            blocks = self.blocks_of(module)
            if self.experts_inputs_first is not None:
                experts = experts_by_inputs(ours, located, *self.experts_inputs_first)
                yield from ((name, part, one) for part, one in experts)
            elif blocks is None:
                yield name, ours, located
            else:
                yield from ((name, part, one) for part, one in blocks.split(ours, located))

    def is_transposed(self, module: str) -> bool:
        """Return whether a matrix of our module `module` is stored as [inputs, outputs]."""
        return _longest(self.transposed, module) is not None

    def blocks_of(self, module: str) -> Blocks | None:
        """Return the order of the rows of our module `module`; None if it is not stored in blocks."""
        found = _longest(self.blocks, module)
        return None if found is None else self.blocks[found]


def _longest(entries: Mapping[str, object] | tuple[str, ...], name: str) -> str | None:
    """Return the longest entry that is the beginning of `name`."""
    if not entries:
        return None
    exact = name.split(".")
    starred = ["*" if part.isdigit() else part for part in exact]
    candidates = (".".join(parts[:length]) for length in range(len(exact), 0, -1) for parts in (exact, starred))
    return next((candidate for candidate in candidates if candidate in entries), None)


NO_NAMES = TensorNames()
AS_STORED = TensorNames(splits_experts=False)  # every tensor by its stored name
