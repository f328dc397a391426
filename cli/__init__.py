"""The `drm-triton` command: one file per subcommand, heavy imports inside the commands."""

import io
import os
import signal
import sys
import warnings
from types import FrameType
from typing import Annotated

import typer

from drm_triton._version import __version__
from drm_triton.cli.bench import bench
from drm_triton.cli.compare import compare
from drm_triton.cli.doctor import doctor
from drm_triton.cli.evaluate import evaluate
from drm_triton.cli.export import export
from drm_triton.cli.flags import Command, Group
from drm_triton.cli.info import info
from drm_triton.cli.messages import print_error, print_warning, select_command
from drm_triton.cli.prepare import prepare
from drm_triton.cli.recommend import recommend
from drm_triton.cli.refit import refit
from drm_triton.cli.report import report
from drm_triton.cli.reproduce import reproduce
from drm_triton.cli.serve import serve
from drm_triton.cli.similar import similar
from drm_triton.cli.train import train
from drm_triton.cli.tune import tune
from drm_triton.errors import DrmError

app = typer.Typer(
    name="drm-triton",
    cls=Group,
    help="Top-K recommenders trained with ranking losses: softmax over the catalogue, or DRM, the differentiable "
    "ranking metric.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"drm-triton {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command(cls=Command)(prepare)
app.command(cls=Command)(info)
app.command(cls=Command)(train)
app.command(cls=Command)(tune)
app.command(cls=Command)(evaluate)
app.command(cls=Command)(compare)
app.command(cls=Command)(refit)
app.command(cls=Command)(recommend)
app.command(cls=Command)(similar)
app.command(cls=Command)(report)
app.command(cls=Command)(reproduce)
app.command(cls=Command)(export)
app.command(cls=Command)(doctor)
app.command(cls=Command)(serve)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line.

    Errors go to stderr as one paragraph, with exit code 1 (failure) or 2 (bad input). --debug adds the traceback.
    """
    # Idle torch threads sleep instead of spinning. Spinning would take cores from the threads of the CPU kernels.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]  # accepted at any position
    debug = len(arguments) < len(sys.argv) - 1
    select_command(typer.main.get_command(app), arguments)
    _exit_cleanly_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may contain any bytes
    try:
        with warnings.catch_warnings():
            warnings.showwarning = print_warning
            try:
                app(arguments)
            finally:
                sys.stdout.flush()  # here, where a failure can still be reported
    except BaseException as error:
        # A failed assertion inside Polars is no `Exception`, nor are the requests to leave, which pass.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if debug:
            import traceback

            traceback.print_exc()
        sys.exit(_report(error))


def _report(error: BaseException) -> int:
    """Print an error as one paragraph and return the exit code."""
    if isinstance(error, DrmError):
        print_error(error)
        return error.exit_code
    if isinstance(error, OSError) and error.filename is None:  # an error of the output, which has no file name
        # Discard what is left in the buffer: it would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print_error(f"cannot write the output: {error.strerror or error}")
    elif isinstance(error, OSError):
        print_error(f"{error.filename}: {error.strerror}")
    elif isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        shown = error.object.encode("utf-8", "backslashreplace").decode()
        print_error(f"{shown} is not in UTF-8: give it in UTF-8, or rename the file")
        return 2
    elif isinstance(error, MemoryError):
        print_error("not enough memory: try smaller data or fewer factors")
    else:
        advice = "`drm-triton doctor` checks the installation" if isinstance(error, ImportError) else "unexpected"
        print_error(f"{type(error).__name__}: {error} ({advice}; --debug shows the traceback)")
    return 1


def _exit_cleanly_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that temporary files are removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, leave)
