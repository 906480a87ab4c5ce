"""The element types of the C++ kernels, by the numbers in `csrc/simd/element_types.h`."""

import torch

ELEMENT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
