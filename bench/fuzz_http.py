"""HTTP requests that `bench.fuzz` changes: bytes for a connection of the service, in process and without a socket."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import uvicorn
from uvicorn.server import ServerState

from drm_triton import Dataset
from drm_triton.errors import InputError
from drm_triton.models import IALS
from drm_triton.serving.app import create_app
from drm_triton.serving.connections import Limits
from drm_triton.serving.metrics import Metrics

TOKEN = "0123456789abcdef"
HEAD = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"


class Pipe(asyncio.Transport):
    """Collects what a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closing = bytearray(), False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Requests:
    """Requests of each kind to a service with a small factor model."""

    def __init__(self, folder: Path) -> None:
        rows = [(f"u{u}", f"i{(u * 7 + j * j) % 13}", ("rock", "jazz")[j % 2]) for u in range(9) for j in range(5)]
        frame = pl.DataFrame(rows, schema=["user", "item", "genre"], orient="row").unique(["user", "item"])
        data = Dataset.from_frame(frame.select("user", "item"), ratios=(1, 0, 0))
        data = data.with_attributes(frame.select("item", "genre").unique("item"))
        metrics = Metrics()
        self.app = create_app(
            IALS(factors=4, epochs=1, backend="reference").fit(data),
            token=TOKEN,
            host_names=["localhost"],
            metrics=metrics,
        )
        limits = Limits(100, 10.0, metrics)
        self.config = uvicorn.Config(self.app, http=limits.protocol, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
        self.config.load()
        self.protocol, self.loop = limits.protocol, asyncio.new_event_loop()
        self.inputs = {
            "user": b"/recommendations?user=u1&k=5&exclude_seen=false&exclude=i1&exclude=i2",
            "ruled": b"/recommendations?user=u2&where=genre%3Drock&at_most=genre%3D1&diversity=0.5&only=i1&only=i2",
            "similar": b"/similar?item=i1&k=3",
            "items": b"/items?query=i1&k=3",
            "liked": b'{"liked": ["i1", "i2"], "k": 3, "exclude": ["i3"], "unknown": "popular"}',
            "liked-ruled": b'{"liked": ["i1"], "where": ["genre=rock"], "at_most": ["genre=2"], "diversity": 0.3}',
        }
        self.inputs |= {f"raw-{name}": self._request(name, self.inputs[name]) for name in ("ruled", "liked")}
        for name, content in self.inputs.items():
            answer = self.loop.run_until_complete(self._answer(self._request(name, content)))
            assert answer.startswith(b"HTTP/1.1 200 "), (name, answer)

    def _request(self, name: str, content: bytes) -> bytes:
        """Return the bytes of a request, of which a target or a body may be the part that was changed."""
        if name.startswith("raw-"):
            return content
        if content and name.startswith("liked"):
            length = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            return f"POST /recommendations HTTP/1.1\r\n{HEAD}{length}\r\n".encode() + content
        return f"GET {quote(content, safe='/?&=%+')} HTTP/1.1\r\n{HEAD}\r\n".encode()

    async def _answer(self, content: bytes) -> bytes:
        """Send bytes over a new connection, which the client then closes, and return what the service wrote."""
        state, pipe = ServerState(), Pipe()
        connection = self.protocol(config=self.config, server_state=state, app_state={}, _loop=self.loop)
        connection.connection_made(pipe)
        connection.data_received(content)
        for _ in range(1000):
            if not state.tasks or (connection.cycle is not None and connection.cycle.more_body):
                break
            await asyncio.wait(set(state.tasks), timeout=30)
        connection.connection_lost(None)
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=30)
        return bytes(pipe.written)

    def read(self, name: str, content: bytes) -> str | None:
        """Send a changed request."""
        head, _, body = self.loop.run_until_complete(self._answer(self._request(name, content))).partition(b"\r\n\r\n")
        if not head:
            raise InputError("no request: the connection is closed without an answer")
        status = int(head.split(b" ", 2)[1])
        if 400 <= status < 500:
            raise InputError(f"status {status}")
        if status != 200:
            return f"status {status}: {body[:200]!r}"
        if b"application/json" in head and b"HTTP/1.1 " not in body and not content.startswith(b"HEAD "):
            json.loads(body)
        return None
