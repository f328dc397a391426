"""`drm-triton serve`: recommendations over HTTP."""

import errno
import ipaddress
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from drm_triton.cli.complete import RunArgument

if TYPE_CHECKING:
    from drm_triton.errors import DrmError

SHUTDOWN_SECONDS = 5  # time for running requests to finish when the service stops


def serve(
    run: RunArgument,
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0 listens on all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 takes any free port.")] = 8000,
    max_k: Annotated[int, typer.Option(min=1, help="Largest k that a request may have.")] = 100,
    max_liked: Annotated[int, typer.Option(min=1, help="Largest number of liked items in a request.")] = 1000,
) -> None:
    """Serve recommendations over HTTP, as JSON. This needs the extra "serve" of the package.

    GET /recommendations?user=ID&k=10 returns items for a user of the training data.

    POST /recommendations returns items for a new user, who is described by liked items.

    GET /similar?item=ID returns similar items. GET /health describes the model, GET /openapi.json all requests.

    There is no authentication.

    Examples:

      drm-triton serve runs/melon

      drm-triton serve runs/melon --port 0 --max-k 500

      curl 'http://127.0.0.1:8000/recommendations?user=12&k=5'

      curl http://127.0.0.1:8000/recommendations --json '{"liked": [17, 42]}'
    """
    from drm_triton.errors import InputError

    try:
        import uvicorn

        from drm_triton.serving.app import create_app
    except ImportError as error:
        if (error.name or "").startswith("drm_triton"):
            raise
        raise InputError(f"serve needs {error.name}: pip install 'drm-triton[serve]'") from None
    from drm_triton.models import load

    model = load(run)
    with _bind(host, port) as listener:  # before the kernels compile, so that a port in use is reported at once
        app = create_app(model, run.resolve().name, max_k, max_liked)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS)
        )
        try:
            listener.listen(server.config.backlog)
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        data = model.interactions
        _announce(data.user_ids.filter(data.train.degrees() > 0).head(1).to_list(), run, listener)
        try:
            server.run(sockets=[listener])
        except (KeyboardInterrupt, SystemExit):  # uvicorn raises the signal again after a clean shutdown
            if not server.should_exit:
                raise


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the port and does not listen yet."""
    from drm_triton.errors import InputError

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--host {host!r} is not an address of this machine: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # on Windows it would let two programs share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> "DrmError":
    from drm_triton.errors import DrmError, InputError

    if error.errno == errno.EADDRINUSE:
        return DrmError(f"port {port} of {host} is in use; stop the program that uses it, or give another --port")
    return InputError(f"cannot listen on {host}, port {port}: {error.strerror}; give another --host or --port")


def _announce(example: list[object], run: Path, listener: socket.socket) -> None:
    """Print the address of the service and an example request; warn if other machines can reach it."""
    host, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(host.split("%")[0]).is_loopback:
        print(
            f"warning: listening on {host}: everyone who can reach this machine can send requests, as there is no "
            "authentication; put a proxy with authentication in front",
            file=sys.stderr,
        )
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"serving {run} at {url} (Ctrl-C to stop)")
    if example:
        print(f"try: curl '{url}/recommendations?user={quote(str(example[0]), safe='')}&k=10'")
    sys.stdout.flush()
