"""Tables as Markdown and as LaTeX: any text, or models x metrics with the best values marked.

The same rows give both formats. Text is escaped, so that a model may have any name. The LaTeX needs the package
booktabs.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from drm_triton.errors import InputError

MARKDOWN_SPECIAL = re.compile(r"([\\`*_|\[\]~]|<(?! ))")  # "< 0.05" opens no tag
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # at the start of a row, it would be an argument of the end of the row above
    "]": "{]}",
}
MINUS = re.compile(r"(?<![\w-])-(?=\d)")

Place = Literal["", "best", "second"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes
    ----------
    text : its content, without markup
    place : "best" is shown bold; "second" is underlined in LaTeX and in italics in Markdown, which has no underline
    mark : a sign that follows the text, raised in LaTeX, for example * for a significant difference
    """

    text: str
    place: Place = ""
    mark: str = ""


Row = Sequence[Cell | str]


def markdown(header: Sequence[str], rows: Sequence[Row]) -> str:
    r"""Return a table in Markdown. The first column is aligned left, the others right.

    Examples
    --------
    >>> print(markdown(["model", "ndcg@10"], [["EASE", Cell("0.32", "best", "*")], ["a|b", "0.3"]]), end="")
    | model |    ndcg@10 |
    |:------|-----------:|
    | EASE  | **0.32**\* |
    | a\|b  |        0.3 |
    """
    texts = [[_markdown_cell(cell) for cell in row] for row in _checked(header, rows)]
    widths = [max(3, *(len(row[column]) for row in texts)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "| " + " | ".join([first, *others]) + " |\n"

    rule = "|:" + "-" * (widths[0] + 1) + "|" + "".join("-" * (width + 1) + ":|" for width in widths[1:]) + "\n"
    return line(texts[0]) + rule + "".join(map(line, texts[1:]))


def latex(header: Sequence[str], rows: Sequence[Row], caption: str = "", label: str = "", wide: bool = False) -> str:
    r"""Return a table in LaTeX, with the rules of booktabs. The first column is aligned left, the others right.

    Parameters
    ----------
    header : names of the columns
    rows : cells
    caption : text above the table, optional
    label : key for \ref, optional; letters, digits and any of ``_ : . -``
    wide : as wide as the page if the text has two columns

    Examples
    --------
    >>> print(latex(["model", "ndcg@10"], [["a_b", Cell("0.32", "best", "*")]], label="tab:quality"), end="")
    \begin{table}
      \centering
      \label{tab:quality}
      \begin{tabular}{lr}
        \toprule
        model & ndcg@10 \\
        \midrule
        a\_b & \textbf{0.32}$^{*}$ \\
        \bottomrule
      \end{tabular}
    \end{table}
    """
    if not re.fullmatch(r"[\w:.-]*", label, re.ASCII):
        raise InputError(f"latex: `label` may have letters, digits and any of _ : . -, got {label!r}")
    environment = "table*" if wide else "table"
    head, *body = ([_latex_cell(cell) for cell in row] for row in _checked(header, rows))
    lines = [
        rf"\begin{{{environment}}}",
        r"  \centering",
        *([rf"  \caption{{{latex_text(caption)}}}"] if caption else []),
        *([rf"  \label{{{label}}}"] if label else []),
        rf"  \begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"    \toprule",
        rf"    {' & '.join(head)} \\",
        r"    \midrule",
        *(rf"    {' & '.join(row)} \\" for row in body),
        r"    \bottomrule",
        r"  \end{tabular}",
        rf"\end{{{environment}}}",
    ]
    return "\n".join(lines) + "\n"


def ranked(
    rows: Sequence[Mapping[str, float | str | None]],
    metrics: Sequence[str],
    marks: Mapping[tuple[str, str], str] | None = None,
    digits: int = 4,
) -> list[Row]:
    """Return the rows of a table of models x metrics, for `markdown` and `latex`.

    In each metric, the highest value is the best. Values that look the same with `digits` decimals share a place. A
    table of fewer than two values in a metric has no best, and one of fewer than three no second.

    Parameters
    ----------
    rows : for each model its name under "model" and its values under the names of the metrics. A value that is missing
        or None is an empty cell.
    metrics : the columns
    marks : from (model, metric) to the sign that follows the value
    digits : number of decimals

    Returns
    -------
    for each model a list of its name and one cell for each metric

    Examples
    --------
    >>> rows = [{"model": "A", "recall@50": 0.3}, {"model": "B", "recall@50": 0.4}]
    >>> ranked(rows, ["recall@50"], {("B", "recall@50"): "*"}, digits=2)
    [['A', Cell(text='0.30', place='', mark='')], ['B', Cell(text='0.40', place='best', mark='*')]]
    """
    table: list[list[Cell | str]] = [[str(row["model"])] for row in rows]
    for metric in metrics:
        values = [None if (value := row.get(metric)) is None else round(float(value), digits) for row in rows]
        present = [value for value in values if value is not None]
        if not all(map(math.isfinite, present)):
            raise InputError(f"a table needs finite values of {metric}, got {present}; use None for an empty cell")
        best, second, *_ = *sorted(set(present), reverse=True), None, None
        for cells, value in zip(table, values, strict=True):
            place: Place = ""
            if value is not None and len(present) > 1:
                place = "best" if value == best else "second" if value == second and len(present) > 2 else ""
            text = "" if value is None else number(value, digits)
            cells.append(Cell(text, place, (marks or {}).get((str(cells[0]), metric), "")))
    return [*table]


def number(value: float, digits: int = 4) -> str:
    """Return a number with some decimals, and 0 without a sign.

    Examples
    --------
    >>> number(0.25), number(-1.5, 1), number(-0.00001)
    ('0.2500', '-1.5', '0.0000')
    """
    return f"{round(value, digits) or 0.0:.{digits}f}"


def p_text(p: float) -> str:
    """Return a p-value as tables show it.

    Examples
    --------
    >>> p_text(0.03456), p_text(1e-9)
    ('0.0346', '< 0.0001')
    """
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def markdown_text(text: str) -> str:
    """Escape what Markdown would take for markup of its own or of HTML, and put the text on one line."""
    return MARKDOWN_SPECIAL.sub(r"\\\1", _one_line(text)).replace("&", "&amp;")


def latex_text(text: str) -> str:
    r"""Escape what LaTeX would take for markup, and put the text on one line.

    Examples
    --------
    >>> print(latex_text("50 % of R&D_x: -0.5"))
    50 \% of R\&D\_x: $-$0.5
    """
    escaped = "".join(LATEX_SPECIAL.get(character, character) for character in _one_line(text))
    return MINUS.sub("$-$", escaped)


def _checked(header: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    table: list[Row] = [header, *rows]
    if not header or any(len(row) != len(header) for row in table):
        raise InputError(f"a table must have {len(header)} cells in each row, as in its header, got {rows}")
    return table


def _markdown_cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return markdown_text(cell)
    sign = {"best": "**", "second": "_"}.get(cell.place, "") if cell.text else ""
    return f"{sign}{markdown_text(cell.text)}{sign}{markdown_text(cell.mark)}"


def _latex_cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return latex_text(cell)
    text, mark = latex_text(cell.text), f"$^{{{latex_text(cell.mark)}}}$" if cell.mark else ""
    command = {"best": r"\textbf", "second": r"\underline"}.get(cell.place)
    return (f"{command}{{{text}}}" if command and text else text) + mark


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
