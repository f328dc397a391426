"""How `recommend` and `similar` write recommendations: block by block, to stdout or to a file that appears complete."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from drm_triton import atomic
from drm_triton.cli.messages import command_line, wrapped
from drm_triton.errors import HeldOutWarning, InputError

if TYPE_CHECKING:
    import polars as pl

    from drm_triton.data.dataset import Dataset
    from drm_triton.recommender import Recommender

OutputFormat = Literal["table", "json", "jsonl", "csv", "parquet"]
FORMATS: tuple[OutputFormat, ...] = get_args(OutputFormat)

FormatOption = Annotated[
    OutputFormat | None,
    typer.Option("--format", help=r"Output format. \[extension of --out, else table]", show_default=False),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write to this file instead of stdout.", show_default=False)
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file --out.")]


def check_output(form: OutputFormat | None, out: Path | None, overwrite: bool) -> OutputFormat:
    """Return the output format: the given one, or else that of the file's suffix, or else a table.

    Refuse a file that cannot be written, or that exists if it must not be replaced, before any work is done.
    """
    suffix = out.suffix.lower().removeprefix(".") if out is not None else "table"
    by_suffix: OutputFormat | None = next((known for known in FORMATS if known == (suffix or "table")), None)
    chosen = form or by_suffix or ("table" if suffix == "txt" else None)
    if chosen is None:
        raise InputError(f"`out` {out}: .{suffix} is none of {', '.join(FORMATS)}; choose one as `form`")
    if out is None and chosen == "parquet":
        raise InputError("`form=parquet` needs `out`: it is not text")
    if out is not None:
        check_file(out, "out", overwrite, "give another `out`, or leave it out to print")
    return chosen


def check_file(file: Path, option: str, overwrite: bool, advice: str) -> None:
    """Refuse a file that cannot be written, or that exists if it must not be replaced, before any work is done.

    Parameters
    ----------
    file : file to write later
    option : name of the option that gives it
    overwrite : an existing file may be replaced
    advice : what to do if it cannot be written
    """
    atomic.check_file(file, advice)
    if file.exists() and not overwrite:
        raise InputError(f"`{option}` {file} already exists; give another, or use `overwrite` to replace it")


def write(frames: Iterable["pl.DataFrame"], form: OutputFormat, out: Path | None) -> None:
    """Write frames with the same columns. The first column is the user or item that a recommendation is for."""
    if form == "parquet":
        from drm_triton.recommender.parts import write_parquet

        assert out is not None
        atomic.write_file(out, lambda place: write_parquet(frames, place))
    elif out is None:
        for text in TO_TEXT[form](frames):
            sys.stdout.write(text)
    else:

        def fill(place: Path) -> None:
            with open(place, "w", encoding="utf-8", newline="") as file:
                file.writelines(TO_TEXT[form](frames))

        atomic.write_file(out, fill)


def with_titles(frame: "pl.DataFrame", data: "Dataset", column: str) -> "pl.DataFrame":
    """Add the titles of the items in a column, if the data has titles."""
    if data.item_titles is None:
        return frame
    titles = data.items.select(data.items["id"].alias(column), "title")
    return frame.join(titles, on=column, how="left", maintain_order="left")


def _csv(frames: Iterable["pl.DataFrame"]) -> Iterator[str]:
    for number, frame in enumerate(frames):
        yield frame.write_csv(include_header=number == 0)


def _jsonl(frames: Iterable["pl.DataFrame"]) -> Iterator[str]:
    return (frame.write_ndjson() for frame in frames)


def _json(frames: Iterable["pl.DataFrame"]) -> Iterator[str]:
    """Yield one JSON array over all frames."""
    opening = "["
    for frame in frames:
        if not frame.is_empty():
            yield opening + frame.write_json()[1:-1]
            opening = ",\n"
    yield "[]\n" if opening == "[" else "]\n"


def _table(frames: Iterable["pl.DataFrame"]) -> Iterator[str]:
    """Yield lines of rank, score and item, under a heading for each user or item."""
    separator = ""
    for frame in frames:
        kind, item = frame.columns[0], frame.columns[2]
        for row in frame.iter_rows(named=True):
            if row["rank"] == 1:
                yield f"{separator}{kind} {_plain(row[kind])}\n"
                separator = "\n"
            score = "popular" if row["score"] is None else f"{row['score']:+.4f}"
            title = f"  {_plain(row['title'])}" if row.get("title") else ""
            cold = "  (cold)" if row.get("cold") else ""
            yield f"{row['rank']:>4}  {score}  {_plain(row[item])}{title}{cold}\n"


def _plain(value: object) -> str:
    """Return text on one line, without control characters."""
    return "".join(character if character.isprintable() else " " for character in str(value))


TO_TEXT: dict[OutputFormat, Callable[[Iterable["pl.DataFrame"]], Iterator[str]]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
}


def note_if_held_out(model: "Recommender[Any]", run: Path) -> None:
    """Print a note on stderr if the model has not learned from all interactions, with the command that does.

    It replaces the warning, which names the method of Python.
    """
    warnings.simplefilter("ignore", HeldOutWarning)
    data = model.interactions
    if data.train.nnz < data.n_interactions:
        share = data.train.nnz / data.n_interactions
        note = f"note: {run} has learned from {share:.0%} of the interactions; the others are held out. "
        note += "This trains the final model on all of them:"
        print(wrapped(note + command_line("refit", run)), file=sys.stderr)
