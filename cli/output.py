"""How `recommend` and `similar` write their lists: block by block, in a file that appears when it is complete."""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from drm_triton import atomic
from drm_triton.errors import InputError

if TYPE_CHECKING:
    import polars as pl

    from drm_triton.data.dataset import Dataset

Format = Literal["table", "json", "jsonl", "csv", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)


def check_output(form: Format | None, out: Path | None) -> Format:
    """The format in force: the one given, or what the name of the file says, or a table to read."""
    ending = out.suffix.lower().removeprefix(".") if out is not None else "table"
    by_name: Format | None = next((known for known in FORMATS if known == (ending or "table")), None)
    chosen = form or by_name or ("table" if ending == "txt" else None)
    if chosen is None:
        raise InputError(f"--out {out}: .{ending} is none of {', '.join(FORMATS)}; say which with --format")
    if out is None and chosen == "parquet":
        raise InputError("--format parquet needs --out: it is not text")
    if out is not None:
        atomic.check_file(out, "give another `out`, or leave it out to print")
    return chosen


def write(frames: Iterable["pl.DataFrame"], form: Format, out: Path | None) -> None:
    """Write frames of the same columns, the first of them naming whose list it is."""
    if form == "parquet":
        assert out is not None
        atomic.write_file(out, lambda place: _write_parquet(frames, place))
    elif out is None:
        for text in TEXTS[form](frames):
            sys.stdout.write(text)
    else:

        def fill(place: Path) -> None:
            with open(place, "w", encoding="utf-8", newline="") as file:
                file.writelines(TEXTS[form](frames))

        atomic.write_file(out, fill)


def with_titles(frame: "pl.DataFrame", data: "Dataset", column: str) -> "pl.DataFrame":
    """Add the titles of the items in a column, where the data has titles."""
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
    """One array over all frames."""
    opening = "["
    for frame in frames:
        if not frame.is_empty():
            yield opening + frame.write_json()[1:-1]
            opening = ",\n"
    yield "[]\n" if opening == "[" else "]\n"


def _table(frames: Iterable["pl.DataFrame"]) -> Iterator[str]:
    """Lines of rank, score and item under a heading for each list."""
    first = True
    for frame in frames:
        kind, item = frame.columns[0], frame.columns[2]
        for row in frame.iter_rows(named=True):
            if row["rank"] == 1:
                yield f"{'' if first else chr(10)}{kind} {_plain(row[kind])}\n"
                first = False
            score = "popular" if row["score"] is None else f"{row['score']:+.4f}"
            title = f"  {_plain(row['title'])}" if row.get("title") else ""
            yield f"{row['rank']:>4}  {score}  {_plain(row[item])}{title}\n"


def _plain(value: object) -> str:
    """Text on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in str(value))


def _write_parquet(frames: Iterable["pl.DataFrame"], place: Path) -> None:
    """Each frame to a file of its own, then all into one: neither step holds more than a few."""
    import polars as pl

    with tempfile.TemporaryDirectory(prefix=f"{place.name}.", dir=place.parent) as folder:
        parts = []
        for number, frame in enumerate(frames):
            parts.append(Path(folder) / f"{number}.parquet")
            frame.write_parquet(parts[-1], compression="uncompressed")
        pl.scan_parquet(parts, glob=False).sink_parquet(place)


TEXTS: dict[Format, Callable[[Iterable["pl.DataFrame"]], Iterator[str]]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
}
