"""What happens to each request before and after the application: counting, logging, refusing."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Collection
from functools import lru_cache
from typing import Literal

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drm_triton.serving.errors import error_response
from drm_triton.serving.metrics import Metrics

LogLevel = Literal["none", "errors", "all"]
# Paths that need no token. The pages hold no data: they ask for the token, and send it with their own requests.
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ready"})
LOGGED = 200  # characters of a path in the log

log = logging.getLogger("drm_triton.serving")


class HeadAsGet:
    """Answers HEAD like GET, with the same headers and without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope.get("method") != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, send_without_body)


class BodyLimit:
    """Rejects a request body that is too large, by its Content-Length header or else while it is received."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count the bytes that it receives."""
        if scope.get("method") == "GET":  # no body is read
            await self.app(scope, receive, send)
            return
        content_length = dict(scope.get("headers", ())).get(b"content-length", b"")
        too_large = content_length.isdigit() and int(content_length[:20]) > self.limit
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            if not too_large:
                message = await receive()
                received += len(message.get("body", b""))
            if too_large or received > self.limit:
                raise HTTPException(413, f"the body of a request may have at most {self.limit:,} bytes")
            return message

        await self.app(scope, receive_counted, send)


class Gate:
    """Refuses requests for another host, and requests without the token.

    A browser sends the name of the host that it believes it talks to. If that is not a name of this service, another
    site has had its own name resolved to this address, to read from the service through the browser of a visitor.

    Parameters
    ----------
    app : the application
    token : the token that a request must carry; None for no token
    host_names : allowed names of this host, besides addresses; None or "*" among them allows all
    """

    def __init__(self, app: ASGIApp, token: str | None, host_names: Collection[str] | None) -> None:
        self.app = app
        self._authorization = None if token is None else f"bearer {token}".encode()
        self._any_host = host_names is None or "*" in host_names
        names = frozenset(map(str.lower, host_names or ()))
        self._is_allowed = lru_cache(64)(lambda host: is_this_host(host.decode("latin-1"), names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle or refuse a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        hosts, given = [], b""
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"authorization":
                given = value
        if not self._any_host and (len(hosts) != 1 or not self._is_allowed(hosts[0])):
            detail = "the Host header does not name this service; --host-name adds names"
            await error_response(400, detail)(scope, receive, send)
        elif self._authorization is None or scope["path"] in OPEN_PATHS or self._is_right(given):
            await self.app(scope, receive, send)
        else:
            detail = "this service needs a token: send the header Authorization: Bearer TOKEN"
            await error_response(401, detail, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_right(self, given: bytes) -> bool:
        """Compare in a time that tells nothing about the token."""
        assert self._authorization is not None
        return hmac.compare_digest(given[:7].lower() + given[7:], self._authorization)


def is_this_host(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an address or one of the names, with or without a port.

    Examples
    --------
    >>> [is_this_host(host, {"localhost"}) for host in ("localhost:8000", "[::1]:8000", "10.0.0.7", "evil.example")]
    [True, True, True, False]
    """
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name = host
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


class Observed:
    """Counts each request, and writes a line about it to the log.

    A line has the address of the client, method, path, status and milliseconds. It leaves out the query, which names
    users.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, level: LogLevel) -> None:
        self.app, self.metrics, self.level = app, metrics, level

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_observed)
        finally:
            seconds = time.perf_counter() - started
            self.metrics.request(scope["method"], scope["path"], status, seconds)
            if self.level == "all" or (self.level == "errors" and status == 500):
                path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")[:LOGGED]
                client = (scope.get("client") or ("-",))[0]
                log.warning("%s %s %s %d %.1f ms", client, scope["method"], ascii(path)[1:-1], status, 1e3 * seconds)
