"""The requests of `/tokenize` (a text or a conversation) and `/detokenize`."""

from typing import Annotated, Any

from pydantic import Field, create_model

from oarlock.server.endpoints.chat.schema import ChatRequest
from oarlock.server.strict_model import MAX_PROMPT_IDS, StrictModel, TokenId

# The fields of a chat request that decide its prompt. The others would be accepted and ignored, so they are left out.
_PROMPT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "add_special_tokens",
)


class TokenFields(StrictModel):
    """Fields that both kinds of input have in common."""

    model: Annotated[str, Field(max_length=512)] | None = Field(None, description="one of the served names")
    return_token_strs: bool | None = Field(False, description="`token_strs`: the text of each token")


class TokenizeRequest(TokenFields):
    """`POST /tokenize` of a text."""

    prompt: str = Field(description="the text; `messages` instead tokenizes a conversation")
    add_special_tokens: bool | None = Field(True, description="false: no beginning-of-sequence token")


_chat_fields: dict[str, Any] = {
    name: (ChatRequest.model_fields[name].rebuild_annotation(), ChatRequest.model_fields[name])
    for name in _PROMPT_FIELDS
    if name in ChatRequest.model_fields
}
TokenizeChatRequest = create_model(
    "TokenizeChatRequest", __base__=TokenFields, __doc__="`POST /tokenize` of a conversation.", **_chat_fields
)


class DetokenizeRequest(StrictModel):
    """`POST /detokenize`."""

    model: Annotated[str, Field(max_length=512)] | None = Field(None, description="one of the served names")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)] = Field(
        description="token ids; special tokens are written by name"
    )


def as_chat(request: StrictModel) -> ChatRequest:
    """The chat request with the prompt of this `TokenizeChatRequest`."""
    return ChatRequest.model_construct(**{name: getattr(request, name) for name in _chat_fields})
