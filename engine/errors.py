"""Errors above the workers, by who can act on them. The server chooses the HTTP status by class, never by text."""

from oarlock.base.watched_reads import STALL_S


class OarlockError(Exception):
    """Base of every error that a caller can get after the start."""


class RequestError(OarlockError):
    """The request is at fault and the client can correct it (400). `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt does not fit the context (400, code `context_length_exceeded`)."""

    def __init__(self, message: str, param: str | None = "prompt") -> None:
        super().__init__(message, param, "context_length_exceeded")


class QueueFullError(OarlockError):
    """The queue is full (429). `retry_after_s` is an estimate from the rate at which requests are admitted."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class EngineError(OarlockError):
    """The engine failed this request through its own fault (500)."""


class UnavailableError(EngineError):
    """A part of the engine is not available now; the same request may succeed later (503). `code` names the part."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class StalledAdapterError(UnavailableError):
    """The files of a LoRA adapter could not be read for long (503, code `adapter_stalled`)."""

    def __init__(self, name: str, path: str) -> None:
        message = (
            f"The adapter {name!r} could not be loaded: nothing could be read from {path} for {STALL_S:g} seconds. "
            "Check its disk or network file system, then try again."
        )
        super().__init__(message, "adapter_stalled")


class BrokenGrammarError(OarlockError):
    """The grammar of a running request failed or takes too long, so the request's field is at fault (400)."""


class MaskPostponedError(OarlockError):
    """A mask was not computed, because other masks had used up the time of its step. Never reaches a caller."""


class EngineDeadError(EngineError):
    """The engine, or a rank below it, is gone, so nothing can be served any more (503)."""


# Error texts for requests that are stopped while they run.
NOT_FINITE = (
    "The model produced values that are not finite (NaN or infinity) for this request, so the engine aborted it. "
    "Other requests are not affected."
)
NO_TOKEN = (
    "No token is allowed next: logit_bias, bad_words, allowed_token_ids and the grammar of this request together ban "
    "every token. Relax at least one of them."
)
OUT_OF_MEMORY = (
    "The server ran out of memory on this request even with the smallest steps, so the engine aborted it. Other "
    "requests are not affected, and the same request may succeed later."
)
INTERNAL = "The server failed while processing this request, so the engine aborted it. The server's log has the cause."
