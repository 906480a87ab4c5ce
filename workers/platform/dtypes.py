"""The dtypes of models and of KV memory, by the names of settings and of torch, and their bytes. Torch-free."""

from dataclasses import dataclass

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of one value

# Tensor dtype in safetensors -> dtype in which the tensor is served.
SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}

# Value of `--kv-cache-dtype` -> format of keys and values; auto: the dtype of the model.
KV_CACHE_DTYPES = {"auto": "auto", "int8": "int8", "fp8": "fp8", "fp8_e4m3": "fp8"}


# 8-bit format -> bytes of the scale of each row, in addition to one byte per element.
EIGHT_BIT_SCALES = {"int8": 2, "fp8": 0}


def row_bytes(cache_dtype: str, head_dim: int, item_bytes: int) -> int:
    """Return the bytes of one KV head's key, or value, of one token. `item_bytes`: bytes of a value in the model's
    dtype."""
    scale = EIGHT_BIT_SCALES.get(cache_dtype)
    return head_dim * item_bytes if scale is None else head_dim + scale


@dataclass(frozen=True, slots=True)
class KVShape:
    """Dimensions of one rank's pages of one memory group that determine their size."""

    num_layers: int
    num_kv_heads: int  # local to the rank
    head_dim: int  # values of one head's key
    block_size: int
    item_bytes: int  # bytes of a value in the model's dtype
    cache_dtype: str = "auto"  # a name of `oarlock.workers.attention.kv_format.FORMATS`
    value_dim: int | None = None  # values of one head's value; None: `head_dim`
    value_in_key: bool = False  # the value is the first `value_width` elements of the key, which are stored once

    @property
    def is_rounded(self) -> bool:
        """Whether keys and values are rounded when they are stored in pages."""
        return self.cache_dtype in EIGHT_BIT_SCALES

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_parts(self) -> tuple[int, ...]:
        """Numbers of values of the parts of a key that are quantized separately.

        A key that contains its value has two parts: the value, and the rotated elements, which may be much larger.
        """
        others = self.head_dim - self.value_width
        is_split = self.is_rounded and self.value_in_key and others > 0
        return (self.value_width, others) if is_split else (self.head_dim,)

    @property
    def key_bytes(self) -> int:
        """Bytes of one KV head's key of one token in one layer."""
        return sum(row_bytes(self.cache_dtype, width, self.item_bytes) for width in self.key_parts)

    @property
    def value_bytes(self) -> int:
        """Bytes of one KV head's value of one token in one layer, in addition to its key."""
        return 0 if self.value_in_key else row_bytes(self.cache_dtype, self.value_width, self.item_bytes)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_bytes + self.value_bytes)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size
