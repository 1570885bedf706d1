"""Errors of `common.errors` as messages and back, so that a room's sentence reaches the client."""

from __future__ import annotations

from common import errors
from common.contract.messages import Refused


def _tree(root: type[errors.ServingError]) -> dict[str, type[errors.ServingError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(errors.ServingError)


def to_refused(error: errors.ServingError) -> Refused:
    """Write an error as a message."""
    part = getattr(error, "part", None) or getattr(error, "param", None) or ""
    message = str(error)
    if isinstance(error, errors.HandoffRefused):
        message = message.removeprefix(f"{error.part}: ")
    return Refused(code=error.code, message=message, part=part)


def from_refused(refused: Refused) -> errors.ServingError:
    """Rebuild the error; a code this version does not know becomes a `ServingError`."""
    kind = _BY_CODE.get(refused.code, errors.ServingError)
    if issubclass(kind, errors.HandoffRefused):
        return kind(refused.part, refused.message)
    if issubclass(kind, errors.InvalidRequest | errors.NotFound):
        return kind(refused.message, param=refused.part or None)
    return kind(refused.message)
