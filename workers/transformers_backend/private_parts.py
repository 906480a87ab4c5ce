"""Everything of transformers that the backend depends on beyond its documented interfaces, named in this one file.

An upgrade of transformers that moves or renames one of these names fails here at import, and one that removes an
attribute fails in the test of this file.
"""

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = [
    "ALL_EXPERTS_FUNCTIONS",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoConfig",
    "AutoModel",
    "Chunk",
    "Concatenate",
    "ErnieFuseAndSplitTextVisionExperts",
    "Interleave",
    "MergeModulelist",
    "PreTrainedModel",
    "PretrainedConfig",
    "Split",
    "Transpose",
    "WeightConverter",
    "WeightRenaming",
    "build_glob_alternation",
    "dot_natural_key",
    "get_class_from_dynamic_module",
    "get_model_conversion_mapping",
    "rename_source_key",
]

# Attributes of model classes that the backend uses, besides those of `torch.nn.Module`. The last of them makes the
# attribute `all_tied_weights_keys` of models.
MODEL_ATTRIBUTES = (
    "_from_config", "_get_dtype_plan", "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected",
    "_tp_plan", "base_model_prefix", "get_input_embeddings", "get_output_embeddings", "initialize_weights",
    "get_expanded_tied_weights_keys",
)  # fmt: skip
