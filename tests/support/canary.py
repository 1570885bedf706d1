"""Small HTTP listeners on loopback: one that must not be contacted, one that images come from."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Listener:
    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self.http.server_address[1]
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self._thread.join()
        self.http.server_close()


class Canary(_Listener):
    """Counts connections and answers none."""

    def __init__(self) -> None:
        self.connections = 0
        canary = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                canary.connections += 1
                super().setup()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(0, Handler)


class ImageHost:
    """The host that a server's settings allow: redirects to the canary, or finds nothing.

    Without a server, no listener.
    """

    def __init__(self, server: Any | None, canary: Canary) -> None:
        self._listener: _Listener | None = None
        if server is None:
            return

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "redirect" in self.path:
                    self.send_response(302)
                    self.send_header("Location", f"http://127.0.0.1:{canary.port}/x.png")
                else:
                    self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._listener = _Listener(int(server.allowed_host.rpartition(":")[2]), Handler)

    def __enter__(self) -> ImageHost:
        if self._listener is not None:
            self._listener.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        if self._listener is not None:
            self._listener.__exit__(*args)
