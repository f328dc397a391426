"""`drm-triton serve`: recommendations over HTTP."""

import errno
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import quote

import typer

from drm_triton.cli.complete import RunArgument, VerifyOption
from drm_triton.cli.messages import QuietOption
from drm_triton.cli.output import note_if_held_out

if TYPE_CHECKING:
    from drm_triton.errors import DrmError

TOKEN_VARIABLE = "DRM_TRITON_TOKEN"
MIN_TOKEN = 16  # characters of a token


def serve(
    run: RunArgument,
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0 listens on all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 takes any free port.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Number of processes, each with the model.")] = 1,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token that requests must carry. Or set {TOKEN_VARIABLE}.")
    ] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of this service in the Host header of requests, besides addresses, localhost and the name of "
            "this machine. Can be repeated; * allows any."
        ),
    ] = None,
    log: Annotated[
        Literal["none", "errors", "all"],
        typer.Option(help="Requests to log to stderr; errors are those of status 500."),
    ] = "errors",
    max_k: Annotated[int, typer.Option(min=1, help="Largest k that a request may have.")] = 100,
    max_liked: Annotated[int, typer.Option(min=1, help="Largest number of liked items in a request.")] = 1000,
    max_exclude: Annotated[int, typer.Option(min=0, help="Largest number of excluded items in a request.")] = 10_000,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Largest number of connections of each process. The descriptors limit it, too.")
    ] = 1000,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which a request must have arrived, from its first byte.")
    ] = 10.0,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds from SIGTERM, in which /ready says 503, until the service stops.")
    ] = 0.0,
    verify: VerifyOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve recommendations over HTTP, as JSON. This needs the extra "serve" of the package.

    GET /recommendations?user=ID&k=10 returns items for a user of the training data.

    POST /recommendations returns items for a new user, who is described by liked items.

    GET /similar?item=ID returns similar items, GET /items?query=TEXT searches for items.

    GET /health describes the model, GET /ready says if requests are welcome, GET /metrics is for Prometheus.

    A browser shows a page to try all this at /, and a description of all requests at /docs.

    SIGHUP loads the model again. SIGTERM ends the service after the requests that are under way.

    Examples:

      drm-triton serve runs/melon

      drm-triton serve runs/melon --port 0 --max-k 500

      drm-triton serve runs/melon --host 0.0.0.0 --workers 4 --token-file token.txt

      curl 'http://127.0.0.1:8000/recommendations?user=12&k=5'

      curl http://127.0.0.1:8000/recommendations --json '{"liked": [17, 42]}'
    """
    from drm_triton.cli.messages import first_word
    from drm_triton.errors import InputError

    token = _token(token_file)
    with first_word(quiet):
        try:
            from drm_triton.serving.server import Settings, serve_alone, serve_in_workers
        except ImportError as error:
            if (error.name or "").startswith("drm_triton"):
                raise
            raise InputError(f"serve needs {error.name}: pip install 'drm-triton[serve]'") from None
        from drm_triton.serving.loading import load_in_memory

        model = load_in_memory(run, verify)
    note_if_held_out(model, run)
    data = model.interactions
    example = data.user_ids.filter(data.train.degrees() > 0).head(1).to_list()
    settings = Settings(
        run.resolve(),
        max_k,
        max_liked,
        max_exclude,
        token,
        _host_names(host, host_name or []),
        log,
        max_connections,
        request_timeout,
        drain,
        verify,
    )
    with _bind(host, port) as listener:  # before the kernels compile, so that a port in use is reported at once

        def start() -> None:
            try:
                listener.listen()
            except OSError as error:
                raise _cannot_listen(host, port, error) from None
            _announce(example, run, listener, token is not None)

        if workers == 1:
            serve_alone(settings, model, listener, start)
        else:
            del model, data  # each worker loads its own
            serve_in_workers(settings, workers, listener, start)


def _token(file: Path | None) -> str | None:
    """Return the token from a file or the environment, or None."""
    from drm_triton.errors import InputError

    if file is None:
        token = os.environ.get(TOKEN_VARIABLE)
        where = TOKEN_VARIABLE
    else:
        where = f"--token-file {file}"
        try:
            token = file.read_text("utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise InputError(f"{where}: cannot read the token ({error})") from None
    if token is not None and (len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        raise InputError(
            f"{where}: a token has at least {MIN_TOKEN} printable ASCII characters and no spaces; make one with "
            "`openssl rand -hex 32`"
        )
    return token


def _host_names(host: str, given: list[str]) -> tuple[str, ...]:
    """Return the names that the Host header of a request may have; addresses are always allowed."""
    return (*given, host, "localhost", socket.gethostname())


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


def _announce(example: list[object], run: Path, listener: socket.socket, has_token: bool) -> None:
    """Print the address of the service and an example request; warn if anyone on other machines can use it."""
    host, port = listener.getsockname()[:2]
    if not has_token and not ipaddress.ip_address(host.split("%")[0]).is_loopback:
        print(
            f"warning: listening on {host}: everyone who can reach this machine can send requests; give --token-file, "
            "or put a proxy with authentication in front",
            file=sys.stderr,
        )
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"serving {run} at {url} (Ctrl-C to stop)")
    if example:
        header = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if has_token else ""
        print(f"try: curl '{url}/recommendations?user={quote(str(example[0]), safe='')}&k=10'{header}")
    sys.stdout.flush()
