"""Names of options in messages: the library writes Python names in backticks, the command line prints flags.

`main` selects the command that runs, and errors and warnings are translated where they are printed. No other code has
to know whether the library was called from Python or from the command line.
"""

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from drm_triton.progress import Reporter

NAME = re.compile(r"`([A-Za-z_]\w*)(?:=([^`]*))?`")  # `min_rating`, or with a value: `unknown="skip"`
COMMAND = re.compile(r"\n(  drm-triton .*)")  # on a line of its own, see `command_line`

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Do not print progress.")]

_flags: dict[str, str] = {}  # Python name -> flag, for the command that runs


def select_command(root: Any, arguments: Iterable[str]) -> None:
    """Translate messages for the command that `arguments` call.

    Parameters
    ----------
    root : the Click group of all commands
    arguments : the words of the command line
    """
    command, words = root, list(arguments)
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands.get(word, command)
    _flags.clear()
    for parameter in command.params:
        name = parameter.name.removesuffix("_option")  # dataset_option is another way to give dataset
        typed = _typed(parameter, words)
        if name not in _flags or typed is not None:
            _flags[name] = typed or _spelling(parameter)


def _typed(parameter: Any, words: Iterable[str]) -> str | None:
    """Return the long name of an option as it was typed, or None. A short name belongs to the long one before it."""
    long = None
    for flag in parameter.opts if parameter.param_type_name == "option" else ():
        long = flag if flag.startswith("--") else long
        if any(word == flag or word.startswith(f"{flag}=") for word in words):
            return str(long or flag)
    return None


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return str(next((flag for flag in parameter.opts if flag.startswith("--")), parameter.opts[0]))


def in_flags(message: object, flags: Mapping[str, str] = _flags) -> str:
    """Replace Python names in backticks by flags. Names that are not parameters of the command stay as they are.

    Examples
    --------
    >>> in_flags("`lam` must be at least 0; try `score=l2`, or `doctor`", {"lam": "--lambda", "score": "--score"})
    '--lambda must be at least 0; try --score l2, or `doctor`'
    """

    def flag(found: "re.Match[str]") -> str:
        name, value = found.groups()
        if name not in flags:
            return found[0]
        return flags[name] if value in (None, "True") else f"{flags[name]} {value.strip(chr(34) + chr(39))}"

    return NAME.sub(flag, str(message))


class FlagReporter(Reporter):
    """A reporter that prints flags instead of Python names."""

    def line(self, text: str) -> None:
        """Print one line."""
        super().line(in_flags(text))


def print_error(message: object) -> None:
    """Print an error as one paragraph on stderr."""
    print(wrapped(f"error: {in_flags(message)}"), file=sys.stderr)


def print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one paragraph on stderr. The signature is that of `warnings.showwarning`."""
    print(wrapped(f"warning: {in_flags(message)}"), file=sys.stderr)


def command_line(*words: object) -> str:
    r"""Return a command for a message, on a line of its own: it is never wrapped, so that it can be copied.

    Examples
    --------
    >>> command_line("train", "--resume", "runs/my songs")
    "\n  drm-triton train --resume 'runs/my songs'"
    """
    return f"\n  {shlex.join(['drm-triton', *map(str, words)])}"


def wrapped(text: str) -> str:
    """Return a paragraph in lines as wide as the terminal of stderr, or on one line if stderr is not a terminal.

    The lines of commands stay whole.
    """
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    prose = COMMAND.split(text)
    prose[::2] = [textwrap.fill(part, width, break_long_words=False, break_on_hyphens=False) for part in prose[::2]]
    return "\n".join(part for part in prose if part)


@contextmanager
def first_word(quiet: bool = False) -> Iterator[None]:
    """Show that the command has begun, while polars and torch are imported, which takes seconds on a busy machine.

    On a terminal, the word disappears again. Elsewhere it is a line, printed if nothing heavy has been imported yet.
    """
    terminal = sys.stderr.isatty()
    if not quiet and (terminal or "polars" not in sys.modules):
        print("starting ...", end="\r" if terminal else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if terminal and not quiet:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def continuable() -> Iterator[None]:
    """Say after Ctrl-C how to continue, for commands that store what is finished and skip it when started again."""
    try:
        yield
    except KeyboardInterrupt:
        again = shlex.join(["drm-triton", *sys.argv[1:]])
        print(f"stopped; what is finished is stored; continue with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
