"""What would keep `baton serve` from ever serving on this machine, told before Ray starts."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from common.config.bounds import told_of_context
from common.config.checkpoint import load_spec
from common.config.settings import Settings
from common.errors import ConfigError


def refuse_what_cannot_start(settings: Settings) -> None:
    """Look at the ports, the device and the checkpoint's configuration; warn of a long context.

    Raises:
        ConfigError: one of them cannot be used; the message says which and what would do.
    """
    at = settings.server
    for host, port in ((at.host, at.port), (at.admin_host, at.admin_port)):
        _refuse_taken(host, port)
    _refuse_device(settings.model.device)
    text = load_spec(Path(settings.model.path)).text
    if said := told_of_context(settings.model.context, text.max_position):
        sys.stderr.write(f"baton: {said}\n")


def _refuse_device(device: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"model.device is {device!r}; use cpu or cuda")
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"model.device is {device!r} and torch finds no GPU here; use cpu")


def _refuse_taken(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; "
                "set server.host, PORT or ADMIN_PORT"
            ) from error
