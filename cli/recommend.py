"""`drm-triton recommend`: the best items for users."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from drm_triton.cli.complete import RunArgument

if TYPE_CHECKING:
    import polars as pl

Format = Literal["table", "json", "jsonl", "csv", "parquet"]


def recommend(
    run: RunArgument,
    user: Annotated[
        list[str] | None, typer.Option("--user", "-u", help="External id; may be repeated.", show_default=False)
    ] = None,
    users: Annotated[Path | None, typer.Option(help="File with one id a line.", show_default=False)] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every user of the training data.")] = False,
    k: Annotated[int, typer.Option("--k", help="Items for each user.")] = 10,
    exclude_seen: Annotated[
        bool, typer.Option("--exclude-seen/--include-seen", help="Leave out what the user already has.")
    ] = True,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write to this file.", show_default=False)] = None,
) -> None:
    """Print the best items for users, with scores; ids as they were in your data.

    Examples:

      drm-triton recommend runs/melon --user 12 --user 99

      drm-triton recommend runs/melon --all --k 50 --format parquet --out top50.parquet
    """
    from drm_triton.errors import InputError
    from drm_triton.model import DRM

    if (user is not None) + (users is not None) + everyone != 1:
        raise InputError("say for whom: --user ID (may be repeated), --users FILE, or --all")
    if form == "parquet" and out is None:
        raise InputError("--format parquet needs --out: it is not text")
    model = DRM.load(run)
    frame = model.recommend(None if everyone else user or _ids(users), k, exclude_seen)
    titles = model.interactions.item_titles
    if titles is not None:
        names = model.interactions.items.select(item="id", title="title")
        frame = frame.join(names, on="item", how="left", maintain_order="left")
    _write(frame, form, out)


def _ids(path: Path | None) -> list[str]:
    from drm_triton.errors import InputError

    assert path is not None
    try:
        return [line for line in path.read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the user ids: {error}") from None


def _write(frame: "pl.DataFrame", form: Format, out: Path | None) -> None:
    from drm_triton.checkpoint import replace_file

    if form == "parquet":
        assert out is not None
        replace_file(out, frame.write_parquet)
        return
    if form == "csv":
        content = frame.write_csv()
    elif form == "jsonl":
        content = frame.write_ndjson()
    elif form == "json":
        content = json.dumps(frame.to_dicts(), ensure_ascii=False) + "\n"
    else:
        content = _table(frame)
    if out is None:
        sys.stdout.write(content)
    else:
        replace_file(out, lambda place: place.write_text(content, "utf-8"))


def _table(frame: "pl.DataFrame") -> str:
    """Lines of rank, score and item under a heading for each user."""
    lines: list[str] = []
    for row in frame.iter_rows(named=True):
        if row["rank"] == 1:
            lines.append(f"{'' if not lines else chr(10)}user {row['user']}")
        title = f"  {row['title']}" if row.get("title") else ""
        lines.append(f"{row['rank']:>4}  {row['score']:+.4f}  {row['item']}{title}")
    return "".join(line + "\n" for line in lines)
