"""Requests to load and unload LoRA adapters, in vLLM's format."""

from typing import Annotated

from pydantic import Field

from oarlock.server.schemas.strict_model import StrictModel

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadAdapterRequest(StrictModel):
    """`POST /v1/load_lora_adapter`."""

    lora_name: _Name = Field(description="name that requests give as `model`")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="path in the directory of `--lora-dir`, absolute or relative to it, or a hub id"
    )
    load_inplace: bool | None = Field(
        False,
        description="replace a loaded adapter of this name once the new one is loaded; requests that the old one is "
        "computing end with an error, unless the content is the same",
    )


class UnloadAdapterRequest(StrictModel):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: _Name = Field(description="name of the adapter; its open requests end with an error")
