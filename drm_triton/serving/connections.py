"""Limits of connections: their number, the time that a request may take to arrive, and how many may wait.

uvicorn ends only connections that are idle between two requests. A client that sends half a header, and then nothing,
would hold a connection for ever, and a few hundred such clients all file descriptors of the process. uvicorn also reads
and parses 256 KiB at a time. These may be ten thousand requests, which take seconds, and memory until each is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from drm_triton.serving.metrics import Metrics

RESPONSE_SECONDS = 60  # in which a client must have taken its response
MAX_HEADERS = 1 << 16  # bytes of a request line and its headers
READ_BYTES = 2048  # that are read and parsed at a time
KEPT_DESCRIPTORS = 64  # for files, pipes and connections that are just being accepted or closed


class Limits:
    """The limits of the connections of one process.

    Parameters
    ----------
    most : largest number of connections
    seconds : in which a request must have arrived, from its first byte, or from the start of the connection
    metrics : counts connections
    """

    def __init__(self, most: int, seconds: float, metrics: Metrics) -> None:
        self.most, self.seconds, self.metrics = allowed_connections(most), seconds, metrics

    def protocol(self, **arguments: Any) -> Any:
        """Create the protocol of a new connection, as uvicorn asks for it."""
        return Connection(self, **arguments)

    def admit(self, new: Connection, connections: Iterable[Connection]) -> None:
        """Make room for a new connection: end the one that has waited longest for its client, or else refuse it."""
        waiting = [other for other in connections if other is not new and other.awaits_client]
        if waiting:
            self.metrics.count("evicted")
            min(waiting, key=lambda connection: connection.since).abort()
        else:
            self.metrics.count("refused")
            new.end(b"503 Service Unavailable")

    def end_late(self, connections: Iterable[Connection]) -> None:
        """End the connections whose clients are too slow."""
        for connection in list(connections):
            age = connection.loop.time() - connection.since
            if age <= (RESPONSE_SECONDS if connection.is_responding else self.seconds):
                continue
            if connection.is_responding or connection.transport.is_closing():  # the client does not read
                self.metrics.count("timed_out")
                connection.abort()
            elif connection.received or connection.cycle is None:
                self.metrics.count("timed_out")
                connection.end(b"408 Request Timeout")
            else:  # idle after a response
                connection.transport.close()


class Flow(FlowControl):
    """Reads on from a client only when all its requests are answered. uvicorn would do so after each answer."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self.connection = connection

    def resume_reading(self) -> None:
        """Read on, or not yet."""
        if not self.connection.pipeline and not self.connection.is_responding:
            super().resume_reading()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection, which knows since when it has waited for its client.

    It reads little at a time, and pauses if that is a request before the answer to the last one. What else the client
    sends then waits in the system, not in memory of this process.
    """

    def __init__(self, limits: Limits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.limits = limits
        self.since = self.loop.time()  # start of the connection, of a request or of a response, whichever is the last
        self.received = 0  # bytes of the present request, until its header is complete
        self.buffer = bytearray(READ_BYTES)

    @property
    def is_responding(self) -> bool:
        """Whether a whole request has arrived that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    @property
    def awaits_client(self) -> bool:
        """Whether only the client can go on: it must send a request, or take its response."""
        return not self.is_responding or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start, or refuse, a connection."""
        super().connection_made(transport)
        self.flow = Flow(self)
        self.limits.metrics.count("opened")
        if len(self.connections) > self.limits.most:
            self.limits.admit(self, self.connections)  # type: ignore[arg-type]

    def connection_lost(self, error: Exception | None) -> None:
        """Forget a connection."""
        self.limits.metrics.count("closed")
        super().connection_lost(error)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return where the next bytes are to be put."""
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Receive what was put into the buffer."""
        self.data_received(bytes(self.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            if not self.received:
                self.since = self.loop.time()
            self.received += len(data)
            answered = self.cycle
            super().data_received(data)
            if self.cycle is answered and self.received > MAX_HEADERS:
                if answered is not None and answered.more_body:  # the rest of a body that was refused
                    self.transport.close()
                else:
                    self.end(b"431 Request Header Fields Too Large")
        else:
            if self.is_responding:  # the client does not wait for its response
                self.flow.pause_reading()
            super().data_received(data)
        if self.is_responding:
            self.since, self.received = self.loop.time(), 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, but not those after a body: uvicorn would add them to the others, without end."""
        if self.cycle is None or self.cycle.scope is not self.scope:
            super().on_header(name, value)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.since, self.received = self.loop.time(), 0
        super().on_response_complete()

    def abort(self) -> None:
        """Close the connection at once; what the client has not taken is lost."""
        self.connections.discard(self)  # uvicorn would do so only when the socket is closed, a moment later
        self.transport.abort()

    def end(self, status: bytes) -> None:
        """Answer with a status and close the connection."""
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


def allowed_connections(most: int) -> int:
    """Return the largest number of connections, which file descriptors of the process may limit further."""
    try:
        import resource
    except ImportError:  # Windows
        return most
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if descriptors == resource.RLIM_INFINITY else max(1, min(most, descriptors - KEPT_DESCRIPTORS))
