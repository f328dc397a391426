"""The `drm-triton` command: one file per subcommand, heavy imports inside the commands."""

import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from drm_triton._version import __version__
from drm_triton.cli.bench import bench
from drm_triton.cli.doctor import doctor
from drm_triton.cli.evaluate import evaluate
from drm_triton.cli.export import export
from drm_triton.cli.info import info
from drm_triton.cli.prepare import prepare
from drm_triton.cli.recommend import recommend
from drm_triton.cli.report import report
from drm_triton.cli.serve import serve
from drm_triton.cli.similar import similar
from drm_triton.cli.train import train
from drm_triton.cli.tune import tune
from drm_triton.errors import DrmError

app = typer.Typer(
    name="drm-triton",
    help="Top-K recommenders trained on the ranking metric itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
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


app.command()(prepare)
app.command()(info)
app.command()(train)
app.command()(tune)
app.command()(evaluate)
app.command()(recommend)
app.command()(similar)
app.command()(report)
app.command()(export)
app.command()(doctor)
app.command()(serve)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; errors go to stderr as one paragraph, with exit code 1 (failure) or 2 (bad input).

    --debug shows where an error arose.
    """
    # torch's idle threads sleep instead of spinning, which would take cores from the threads of the CPU kernels
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]  # it may stand anywhere
    debug = len(arguments) < len(sys.argv) - 1
    _end_orderly()
    try:
        try:
            app(arguments)
        finally:
            sys.stdout.flush()  # here, where a failure can still be told
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        sys.exit(_tell(error))


def _tell(error: Exception) -> int:
    """Print an error as one paragraph and return the exit code."""
    if isinstance(error, DrmError):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and error.filename is None:  # only the output has no name
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at the exit
        if not isinstance(error, BrokenPipeError):
            print(f"error: cannot write the output: {error.strerror or error}", file=sys.stderr)
        return 1
    if isinstance(error, OSError):
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if isinstance(error, MemoryError):
        print("error: not enough memory: try smaller data or fewer factors", file=sys.stderr)
        return 1
    advice = "`drm-triton doctor` examines the installation" if isinstance(error, ImportError) else "unforeseen"
    print(f"error: {type(error).__name__}: {error} ({advice}; --debug shows where it arose)", file=sys.stderr)
    return 1


def _end_orderly() -> None:
    """Let kill and a closed terminal unwind the program as Ctrl-C does, so that nothing half done stays."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, end)
