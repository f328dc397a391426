"""A reproduced table or figure: its rows beside the published ones, its notes, and the files that hold them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drm_triton import atomic
from drm_triton.experiments.stand_in import STAND_IN, WIDTH, Data
from drm_triton.experiments.tables import latex, markdown, markdown_text, number

MISSING = "–"

Row = Mapping[str, Any]
Show = Callable[[Row], str]  # the text of a cell


@dataclass(frozen=True)
class Result:
    """A reproduced table or figure.

    Attributes
    ----------
    what : its name, such as table3
    title : what it shows, without the data
    data : the data sets
    columns : from the name of a column to the text of its cells
    rows : values by name; more of them than the columns show, perhaps
    notes : what it tells, what it cannot show, and why
    settings : the budget and the options, for the JSON file
    quick : whether it is only a first look
    draw : writes the picture to a PNG file, under the given title; None if there is no picture
    """

    what: str
    title: str
    data: Sequence[Data]
    columns: Mapping[str, Show]
    rows: Sequence[Row]
    notes: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    draw: Callable[[Path, str], None] | None = None

    @property
    def stand_in(self) -> bool:
        """Whether all data is synthetic."""
        return all(data.stand_in for data in self.data)

    @property
    def prefix(self) -> str:
        """The beginning of each printed line that is not a row."""
        return f"{STAND_IN} | " if self.stand_in else ""

    @property
    def caption(self) -> str:
        """The title with the data, and with the words that the reader must not miss."""
        number = self.what.replace("table", "Table ").replace("figure", "Figure ")
        labels = ", ".join(data.label for data in self.data)
        quick = " Quick look: a small budget, not a result." if self.quick else ""
        return f"{number} of the paper, on {labels}: {self.title}.{quick}"

    @property
    def stem(self) -> str:
        """The name of its files, without the suffix."""
        words = [self.what, *(["quick"] if self.quick else []), *([STAND_IN] if self.stand_in else [])]
        return "-".join(words).replace(" ", "-")

    def cells(self) -> list[list[str]]:
        """Return the texts of the rows."""
        return [[show(row) for show in self.columns.values()] for row in self.rows]

    def text(self) -> str:
        """Return the table and the notes for a terminal, with the label of a stand-in in each line."""
        prefix = self.prefix
        caption, *notes = (
            [prefix + line for line in textwrap.wrap(note, WIDTH - len(prefix))] for note in (self.caption, *self.notes)
        )
        first, *others = self.columns
        # The first column of the rows is the label of the data.
        table = aligned([STAND_IN if self.stand_in else first, *others], self.cells())
        return "\n".join([*caption, *table, *(line for note in notes for line in note)])

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "what": self.what,
            "caption": self.caption,
            "quick": self.quick,
            "data": [_described(one) for one in self.data],
            "settings": dict(self.settings),
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def write(self, folder: Path) -> list[Path]:
        """Write the table as Markdown, LaTeX and JSON, and the picture. Return the files."""
        header, cells = list(self.columns), self.cells()
        notes = "".join(f"- {markdown_text(note)}\n" for note in self.notes)
        comments = "".join(f"% {note}\n" for note in self.notes)
        texts = {
            "md": f"{markdown_text(self.caption)}\n\n{markdown(header, cells)}\n{notes}",
            "tex": comments + latex(header, cells, self.caption, f"tab:{self.stem}"),
            "json": json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n",
        }
        files = []
        for suffix, text in texts.items():
            files.append(folder / f"{self.stem}.{suffix}")
            atomic.write_text(files[-1], text, parents=True)
        if self.draw is not None:
            draw, title = self.draw, "\n".join(textwrap.wrap(self.caption, 80))
            files.append(folder / f"{self.stem}.png")
            atomic.write_file(files[-1], lambda place: draw(place, title))
        return files


def _described(data: Data) -> dict[str, Any]:
    path = str(Path(str(data.dataset.path)).resolve())
    return {"name": data.label, "path": path, "checksum": data.dataset.checksum, "stand_in": data.stand_in}


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table as plain text, the first column to the left and the others to the right.

    Examples
    --------
    >>> for line in aligned(["model", "users"], [["wmf", "1"], ["drm-dot", "200"]]): print(line)
    model    users
    wmf          1
    drm-dot    200
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in (header, *rows):
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    return lines


def value(name: str, digits: int = 4) -> Show:
    """Return how to show a number: with some decimals, or as MISSING if it is None."""
    return lambda row: MISSING if row.get(name) is None else number(row[name], digits)


def difference(digits: int = 4) -> Show:
    """Return how to show `ours` less `published`."""

    def show(row: Row) -> str:
        if row.get("ours") is None or row.get("published") is None:
            return MISSING
        text = number(row["ours"] - row["published"], digits)
        return text if text.startswith("-") else f"+{text}"

    return show


def text(name: str) -> Show:
    """Return how to show a text or a whole number."""
    return lambda row: f"{row[name]:,}" if isinstance(row[name], int) else str(row[name])


def means_of(seeds: int) -> str:
    """Return how many seeds a mean is over.

    Examples
    --------
    >>> means_of(5), means_of(1)
    ('means of 5 seeds', '1 seed')
    """
    return f"means of {seeds} seeds" if seeds > 1 else "1 seed"
