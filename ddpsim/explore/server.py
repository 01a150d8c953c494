"""The page served to one browser: a token, known hosts, small requests, nothing else.

http.server of the standard library is enough: one user, one page, and answers that take the
processor, not the network. It brings no dependency that has to be kept up to date.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ddpsim.explore.answer import Given
from ddpsim.explore.worker import Worker
from ddpsim.files import json_of

_MOST_BYTES = 512 * 1024  # of a question: its text is at most half as long
_PATIENCE_S = 10.0  # for a browser that sends a question
_REPORT_LIMIT_S = 60.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest stands in the page
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """The page on `/`, and its questions, as JSON, on `/answer`.

    A question needs the token, which the page's address has behind its `#`: it is never sent with
    the address. Steps have a process of their own, so that they do not wait for what is slow.
    """

    daemon_threads = True

    def __init__(
        self, page: str, given: Given, host: str = "127.0.0.1", port: int = 0, limit_s: float = 10
    ) -> None:
        self.quick, self.slow = Worker(given, limit_s), Worker(given, max(limit_s, _REPORT_LIMIT_S))
        self._has_ended = False
        super().__init__((host, port), _Handler)
        self.page, self.token = page.encode(), secrets.token_urlsafe(24)
        number = self.server_address[1]
        names = {host, *(("127.0.0.1", "localhost") if host.startswith("127.") else ())}
        self.hosts = frozenset(f"{name}:{number}" for name in names)
        self.quick.start()
        self.url = f"http://{host}:{number}/"

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"{self.url}#token={self.token}"

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question of the page; raises ConnectionError after the end."""
        if self._has_ended:
            raise ConnectionAbortedError("the server has ended")
        is_quick = question.get("part") in ("start", "step")
        return (self.quick if is_quick else self.slow).ask(question)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, but for a browser that has left before its answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """End what answers, too."""
        self._has_ended = True
        super().server_close()
        self.quick.close()
        self.slow.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE_S
    server: Server
    server_version, sys_version = "ddpsim", ""

    def do_GET(self) -> None:
        """The page; it holds nothing of a scenario."""
        if self._refused(None):
            return
        if self.path == "/favicon.ico":
            self._reply(HTTPStatus.NO_CONTENT, b"")
            return
        if self.path != "/":
            self._reply(HTTPStatus.NOT_FOUND, b"there is one page here: /")
            return
        self._reply(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        """One question."""
        sent = self.headers.get("X-Ddpsim-Token", "")
        if self._refused(sent):
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"wanted at most {_MOST_BYTES} B")
            return
        try:
            question = json_of(self.rfile.read(int(length)).decode())
        except ValueError:
            question = None
        if self.path != "/answer" or not isinstance(question, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "wanted a question as JSON on /answer")
            return
        content = json.dumps(self.server.ask(question), separators=(",", ":")).encode()
        self._reply(HTTPStatus.OK, content, "application/json")

    def _refused(self, token: str | None) -> bool:
        """Whether a request is not our page's: another host, another site, no token."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host not in self.server.hosts or origin not in (None, f"http://{host}"):
            self._refuse(HTTPStatus.FORBIDDEN, "this page answers to its own address alone")
        elif token is not None and not hmac.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            self._refuse(HTTPStatus.UNAUTHORIZED, "open the address that ddpsim explore printed")
        else:
            return False
        return True

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self.close_connection = True  # what was sent along is not read
        self._reply(status, reason.encode())

    def _reply(self, status: HTTPStatus, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 -- http.server's name
        """Nothing: a move of a slider is no line on the terminal."""
