"""Tables in Markdown and LaTeX: places, marks, empty cells, and names with markup in them."""

import html
import math
import re
from collections.abc import Callable, Sequence

import pytest

from drm_triton.errors import InputError
from drm_triton.experiments.tables import Cell, Row, latex, latex_text, markdown, markdown_text, number, ranked

EVIL = r"a|b & c_d <i> 50% #1 ${x}$ ~^\ *e* `f`"
ROWS = [
    {"model": "A", "ndcg@10": 0.30004, "recall@50": 0.5},
    {"model": "B", "ndcg@10": 0.30001, "recall@50": 0.6},
    {"model": "C", "ndcg@10": 0.2, "recall@50": None},
    {"model": "D", "ndcg@10": 0.1},
]


def column(rows: Sequence[Row], number: int) -> list[Cell]:
    return [cell for row in rows if isinstance(cell := row[number], Cell)]


def places(number: int) -> list[str]:
    return [cell.place for cell in column(ranked(ROWS, ["ndcg@10", "recall@50"]), number)]


def test_values_that_look_the_same_share_a_place() -> None:
    assert places(1) == ["best", "best", "second", ""]


def test_empty_cells_have_no_place_and_two_values_have_no_second() -> None:
    assert places(2) == ["", "best", "", ""]
    assert [cell.text for cell in column(ranked(ROWS, ["ndcg@10", "recall@50"]), 2)] == ["0.5000", "0.6000", "", ""]


def test_a_single_model_is_not_the_best() -> None:
    assert ranked(ROWS[:1], ["ndcg@10"]) == [["A", Cell("0.3000")]]


def test_negative_values_are_in_order() -> None:
    rows = [{"model": name, "gain": value} for name, value in (("A", -0.2), ("B", -0.1), ("C", 0.0))]
    assert [cell.place for cell in column(ranked(rows, ["gain"]), 1)] == ["", "second", "best"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(value: float) -> None:
    with pytest.raises(InputError, match=r"finite values of ndcg@10, .*; use None for an empty cell"):
        ranked([{"model": "A", "ndcg@10": value}], ["ndcg@10"])


def test_both_formats_of_a_ranked_table() -> None:
    rows = ranked(ROWS, ["ndcg@10", "recall@50"], {("B", "recall@50"): "*"})
    assert markdown(["model", "ndcg@10", "recall@50"], rows) == (
        "| model |    ndcg@10 |    recall@50 |\n"
        "|:------|-----------:|-------------:|\n"
        "| A     | **0.3000** |       0.5000 |\n"
        "| B     | **0.3000** | **0.6000**\\* |\n"
        "| C     |   _0.2000_ |              |\n"
        "| D     |     0.1000 |              |\n"
    )
    assert latex(["model", "ndcg@10", "recall@50"], rows, "Test means", "tab:test") == "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            r"  \caption{Test means}",
            r"  \label{tab:test}",
            r"  \begin{tabular}{lrr}",
            r"    \toprule",
            r"    model & ndcg@10 & recall@50 \\",
            r"    \midrule",
            r"    A & \textbf{0.3000} & 0.5000 \\",
            r"    B & \textbf{0.3000} & \textbf{0.6000}$^{*}$ \\",
            r"    C & \underline{0.2000} &  \\",
            r"    D & 0.1000 &  \\",
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def test_markdown_of_a_name_with_markup() -> None:
    line = markdown(["model", "x"], [[EVIL, "1"]]).splitlines()[2]
    assert len(re.findall(r"(?<!\\)\|", line)) == 3  # the borders of two columns
    escaped = markdown_text(EVIL)
    assert html.unescape(re.sub(r"\\([^a-z ])", r"\1", escaped)) == EVIL
    assert not re.search(r"(?<!\\)[`*_<\[\]~]", re.sub(r"\\\\", "", escaped))
    assert markdown_text("< 0.0001") == "< 0.0001"  # readable, and no tag


def test_latex_of_a_name_with_markup() -> None:
    escaped = latex_text(EVIL)
    assert escaped == (
        r"a\textbar{}b \& c\_d \textless{}i\textgreater{} 50\% \#1 \$\{x\}\$ "
        r"\textasciitilde{}\textasciicircum{}\textbackslash{} *e* `f`"
    )


def test_a_row_of_latex_may_start_with_a_bracket() -> None:
    assert "    {[}1{]} & 2 \\\\\n" in latex(["model", "x"], [["a", "1"], ["[1]", "2"]])


def test_a_wide_table_of_latex() -> None:
    lines = latex(["model"], [["A"]], wide=True).splitlines()
    assert (lines[0], lines[-1]) == (r"\begin{table*}", r"\end{table*}")


def test_minus_signs_of_latex() -> None:
    assert latex_text("-0.5, -1 to run-2 and e-5") == "$-$0.5, $-$1 to run-2 and e-5"


@pytest.mark.parametrize("text", [markdown_text, latex_text])
def test_a_name_stays_on_its_line(text: Callable[[str], str]) -> None:
    assert text("a\nb\tc\x00") == "a b c "


def test_zero_has_no_sign() -> None:
    assert [number(value) for value in (-0.0, -0.00004, -0.00006)] == ["0.0000", "0.0000", "-0.0001"]


@pytest.mark.parametrize("table", [markdown, latex])
def test_rows_of_another_length(table: Callable[..., str]) -> None:
    with pytest.raises(InputError, match="2 cells in each row"):
        table(["model", "x"], [["A"]])


def test_a_label_that_latex_cannot_have() -> None:
    with pytest.raises(InputError, match="`label` may have letters"):
        latex(["model"], [["A"]], label="a}b")
