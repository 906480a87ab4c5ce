"""The number types that models are served in, by the names that settings and torch use. Torch-free."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of one number

# The type a checkpoint's tensor is served in, by the name that safetensors gives its own.
SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}

# The names of `--kv-cache-dtype`, and the forms of keys and values that they mean; auto: the type of the model.
KV_CACHE_DTYPES = {"auto": "auto", "int8": "int8", "fp8": "fp8", "fp8_e4m3": "fp8"}
