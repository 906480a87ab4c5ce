"""The types of tensors in GGUF files, as ggml numbers them: how many elements and bytes one block has. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """`elements` neighbours of a row are stored together in `size` bytes."""

    name: str
    elements: int
    size: int


# By ggml's number. Types without an entry were removed from the format, or are never stored.
TYPES = {
    number: BlockType(name, elements, size)
    for number, name, elements, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}

FLOATS = ("F32", "F16", "BF16")  # the same names as in safetensors files


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Form of the numbers in blocks: weight = value * scale + offset, one scale for `group` neighbours of a row."""

    group: int
    bits: int  # 4: values are from -8 to 7; 8: from -128 to 127
    has_offsets: bool


GROUP_FORMS = {
    "Q4_0": GroupForm(32, 4, False),
    "Q4_1": GroupForm(32, 4, True),
    "Q5_0": GroupForm(32, 8, False),
    "Q5_1": GroupForm(32, 8, True),
    "Q8_0": GroupForm(32, 8, False),
    "Q4_K": GroupForm(32, 4, True),
    "Q5_K": GroupForm(32, 8, True),
    "Q6_K": GroupForm(16, 8, False),
}
SERVED = (*FLOATS, *GROUP_FORMS)  # the types that can be read
