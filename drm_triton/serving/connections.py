"""Limits of connections: their number, and the time that a request may take to arrive.

uvicorn ends only connections that are idle between two requests. A client that sends half a header, and then nothing,
would hold a connection for ever, and a few hundred such clients all file descriptors of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from drm_triton.serving.metrics import Metrics

RESPONSE_SECONDS = 60  # in which a client must have taken its response
MAX_HEADERS = 1 << 16  # bytes of a request line and its headers
KEPT_DESCRIPTORS = 64  # for files, pipes and connections that are just being accepted or closed

# `uvicorn` declares the protocol without its attributes, which those of httptools and of h11 share.
Base: Any = asyncio.Protocol if TYPE_CHECKING else AutoHTTPProtocol


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
        waiting = [other for other in connections if other is not new and not other.is_responding]
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


class Connection(Base):  # type: ignore[misc]
    """One connection, which knows since when it has waited for its client."""

    def __init__(self, limits: Limits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.limits = limits
        self.since = self.loop.time()  # start of the connection, of a request or of a response, whichever is the last
        self.received = 0  # bytes of the present request, until its header is complete

    @property
    def is_responding(self) -> bool:
        """Whether a whole request has arrived that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start, or refuse, a connection."""
        super().connection_made(transport)
        self.limits.metrics.count("opened")
        if len(self.connections) > self.limits.most:
            self.limits.admit(self, self.connections)

    def connection_lost(self, error: Exception | None) -> None:
        """Forget a connection."""
        self.limits.metrics.count("closed")
        super().connection_lost(error)

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
            super().data_received(data)
        if self.is_responding:
            self.since, self.received = self.loop.time(), 0

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
