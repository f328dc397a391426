"""Connections in process, over a pair of sockets: what a client can make the service hold."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from drm_triton.serving.connections import READ_BYTES, Connection, Limits
from drm_triton.serving.metrics import Metrics
from tests.conftest import HANG

LARGE = 1 << 20  # bytes of a response, more than a pair of sockets holds


class Server:
    """Answers a path with the path, when `go` is set, or `/large` with many bytes at once."""

    def __init__(self, most: int) -> None:
        self.limits, self.state, self.go = Limits(most, 10.0, Metrics()), ServerState(), asyncio.Event()
        self.longest = 0  # pipeline at the time of a response
        options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "interface": "asgi3"}
        self.config = uvicorn.Config(self.respond, http=self.limits.protocol, **options)  # type: ignore[arg-type]
        self.config.load()

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope["path"].encode()
        if body == b"/large":
            body = bytes(LARGE)
        else:
            while (await receive()).get("more_body"):
                pass
            await self.go.wait()
        self.longest = max(self.longest, *(len(connection.pipeline) for connection in self.connections), 0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    @property
    def connections(self) -> set[Connection]:
        return self.state.connections  # type: ignore[return-value]

    async def connect(self) -> tuple[Connection, asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        make = partial(self.limits.protocol, config=self.config, server_state=self.state, app_state={})
        _, connection = await asyncio.get_running_loop().connect_accepted_socket(make, ours)
        return connection, *await asyncio.open_connection(sock=theirs)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def turns() -> None:
    """Let the event loop do all that it can."""
    for _ in range(1000):
        await asyncio.sleep(0)


GET = b"GET /%d HTTP/1.1\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("form", [GET, POST])
def test_requests_ahead_of_their_answers_wait_unread(form: bytes) -> None:
    requests, at_most = 10_000, 2 * READ_BYTES // len(form % 0)

    async def main() -> None:
        server = Server(most=10)
        _, reader, writer = await server.connect()
        writer.write(b"".join(form % number for number in range(requests)))
        await turns()
        server.go.set()
        for number in range(requests):  # none is lost, and they are answered in order
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(f"/{number}")) == b"/%d" % number
        assert 0 < server.longest <= at_most
        writer.close()

    asyncio.run(asyncio.wait_for(main(), HANG))


def test_a_header_without_end_behind_a_request_waits_unread() -> None:
    async def main() -> None:
        server = Server(most=10)
        connection, _, writer = await server.connect()
        writer.write(GET % 0 + b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 100_000)
        await turns()
        read = len(connection.headers) * len(b"X: x\r\n")
        server.go.set()
        assert read <= 2 * READ_BYTES
        writer.close()

    asyncio.run(asyncio.wait_for(main(), HANG))


def test_headers_after_a_body_are_dropped() -> None:
    async def main() -> None:
        server = Server(most=10)
        connection, _, writer = await server.connect()
        writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: x\r\n" * 1000)
        await turns()
        server.go.set()
        writer.close()
        assert connection.headers == [(b"transfer-encoding", b"chunked")]

    asyncio.run(asyncio.wait_for(main(), HANG))


def test_a_client_that_does_not_read_makes_room_for_another() -> None:
    async def main() -> None:
        server = Server(most=2)
        idler, _, its_end = await server.connect()
        its_end.write(b"GET /large HTTP/1.1\r\n\r\n" * 2)
        await until(lambda: idler.flow.write_paused and idler.is_responding)
        computing, _, other_end = await server.connect()
        other_end.write(GET % 1)
        await until(lambda: computing.is_responding)
        new, _, writer = await server.connect()
        await turns()
        left = set(server.connections)
        server.go.set()
        for end in (its_end, other_end, writer):
            end.close()
        await until(lambda: not server.connections)
        assert left == {computing, new}

    asyncio.run(asyncio.wait_for(main(), HANG))
