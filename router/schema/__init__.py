"""The public API as types: what a request may say, and what a reply looks like.

Nothing here does I/O, knows a tokenizer or speaks to a room. A body becomes a checked request, or
an `InvalidRequest` that names the field at fault.
"""

from router.schema.chat import ChatRequest, parse_chat
from router.schema.completions import CompletionRequest, parse_completion
from router.schema.limits import RequestLimits
from router.schema.messages import (
    AssistantMessage,
    DeveloperMessage,
    ImagePart,
    ImageSource,
    Message,
    SystemMessage,
    TextPart,
    ToolMessage,
    ToolResult,
    Turn,
    UserMessage,
    image_sources,
)
from router.schema.sampling import Script, fit_sampling, ignored_header

__all__ = [
    "AssistantMessage",
    "ChatRequest",
    "CompletionRequest",
    "DeveloperMessage",
    "ImagePart",
    "ImageSource",
    "Message",
    "RequestLimits",
    "Script",
    "SystemMessage",
    "TextPart",
    "ToolMessage",
    "ToolResult",
    "Turn",
    "UserMessage",
    "fit_sampling",
    "ignored_header",
    "image_sources",
    "parse_chat",
    "parse_completion",
]
