"""Every error raised on purpose. `router/faults.py` maps the tree to HTTP.

ServingError
├── ConfigError                 start-up: a setting is wrong
│   ├── CheckpointError         the checkpoint's files or names are wrong
│   └── BackendUnsupported      the chosen kernel body cannot take the model's shapes
├── InvalidRequest        400   the caller must change the request
│   ├── ContextLengthExceeded
│   └── ImageRejected
├── Unauthorized          401   no API key, or an unknown one
├── NotFound              404
├── TooSlow               408   the request did not arrive in time
├── BodyTooLarge          413
├── CapacityError         429   no room now; the same request may succeed later
├── RateLimited           429   this key has used its share
├── NotReady              503   no pair of rooms has passed its probe
├── RoomLost              503   a replica died, or stopped answering
├── TransferError         503   bytes could not be moved
│   └── HandoffRefused          what arrived, or was promised, is not what was signed
├── PoisonedState         500   a non-finite value was found in a request's state or logits
├── DeadEnd               500   the answer's grammar allows no token
├── DeadlineExceeded      504
└── Cancelled                   the client left; never reaches HTTP
"""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    """Root of every error we raise on purpose."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class ConfigError(ServingError):
    """A setting is wrong; the message names the table, the key and the remedy."""

    code = "config_error"


class CheckpointError(ConfigError):
    """The checkpoint's files, names, shapes or dtypes are not the model's."""

    code = "checkpoint_error"


class BackendUnsupported(ConfigError):
    """The chosen body of an op cannot take this model's shapes on this device."""

    code = "backend_unsupported"


class InvalidRequest(ServingError):
    """The request must be changed; `param` names the field at fault."""

    code, status = "invalid_request_error", 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Keep the field's name beside the sentence."""
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and the answer asked for, do not fit the model's context."""

    code = "context_length_exceeded"


class ImageRejected(InvalidRequest):
    """An image is broken, too large, of an unknown format, or may not be fetched."""

    code = "invalid_image"


class Unauthorized(ServingError):
    """The request carries no API key, or one that is not known here."""

    code, status = "invalid_api_key", 401


class NotFound(ServingError):
    """An unknown path or model."""

    code, status = "not_found", 404

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Keep the field's name beside the sentence."""
        super().__init__(message)
        self.param = param


class TooSlow(ServingError):
    """The request's body did not arrive in time."""

    code, status = "request_timeout", 408


class BodyTooLarge(ServingError):
    """The request's body is over the configured limit."""

    code, status = "request_too_large", 413


class CapacityError(ServingError):
    """No room now; the same request may succeed later."""

    code, status, retryable = "at_capacity", 429, True


class RateLimited(ServingError):
    """The request's API key has used its share; `retry_after_s` says when to come back."""

    code, status, retryable = "rate_limit_exceeded", 429, True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        """Keep the time beside the sentence."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(ServingError):
    """No prefill and decode replica have passed a probe with each other."""

    code, status, retryable = "not_ready", 503, True


class RoomLost(ServingError):
    """A replica died or stopped answering while it held the request."""

    code, status, retryable = "room_lost", 503, True


class TransferError(ServingError):
    """Bytes could not be moved between two rooms."""

    code, status, retryable = "transfer_failed", 503, True
    library = ""  # NIXL's own name of what went wrong, where it was NIXL that complained


class HandoffRefused(TransferError):
    """What arrived, or was promised, is not what was signed. `part` names it.

    Parts: model_print, layout_print, producer, epoch, nonce, lease, token_count, token_hash,
    ranks, span:<kind>, digest:<kind>:<layer>, finite:<kind>, canary, reservation.
    """

    code = "handoff_refused"

    def __init__(self, part: str, message: str) -> None:
        """Keep the refused part's name beside the sentence."""
        super().__init__(f"{part}: {message}")
        self.part = part

    @property
    def family(self) -> str:
        """The part without its layer: few enough values for a metric's label."""
        return ":".join(self.part.split(":")[:2])


class PoisonedState(ServingError):
    """A non-finite value was found in a request's logits or state."""

    code = "non_finite"


class DeadEnd(ServingError):
    """The grammar that the answer must follow allows no token at all."""

    code = "grammar_dead_end"


class DeadlineExceeded(ServingError):
    """The request's time ran out in one of the rooms."""

    code, status = "deadline_exceeded", 504


class Cancelled(ServingError):
    """The request was cancelled by its client."""

    code, status = "cancelled", 499
