"""Escape text for HTML, and build the elements that all sections use."""

import html
import re
from collections.abc import Iterable, Sequence

METRIC_TITLES = {
    "ndcg": "NDCG", "map": "MAP", "recall": "Recall", "precision": "Precision",
    "hit": "Hit rate", "mrr": "MRR", "coverage": "Coverage",
}  # fmt: skip
MAIN_METRIC = "ndcg@10"  # shown at the top, and by user activity


# Control characters that HTML forbids or that a parser changes. Tab and newline are allowed.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


def metric_title(name: str) -> str:
    """Return the title of a metric.

    Examples
    --------
    >>> metric_title("ndcg@10")
    'NDCG@10'
    """
    metric, _, k = name.partition("@")
    return f"{METRIC_TITLES.get(metric, metric)}@{k}"


def escape(text: object) -> str:
    r"""Escape text for element content and quoted attributes. Control characters become visible escape sequences.

    Examples
    --------
    >>> escape('<b title="x">&')
    '&lt;b title=&quot;x&quot;&gt;&amp;'
    >>> escape("a\x00b")
    'a\\x00b'
    """
    clean = str(text).encode("utf-8", "backslashreplace").decode("utf-8")  # file names may contain invalid bytes
    return html.escape(CONTROL.sub(lambda match: ascii(match[0])[1:-1], clean), quote=True)


def value(number: float | None, form: str = ".4f") -> str:
    """Format a number for reading and keep all its digits in the `value` attribute for programs."""
    return "–" if number is None else f'<data value="{number!r}">{number:{form}}</data>'


def table(label: str, heads: Iterable[str], rows: Iterable[Sequence[str]], above: str = "", kind: str = "") -> str:
    """Build a table inside a box that scrolls on narrow screens, with the keyboard too.

    Parameters
    ----------
    label : plain text that a screen reader announces
    heads, rows : HTML of the cells. The first cell of a row is its heading.
    above : HTML of a second row of headings, above `heads`
    kind : CSS classes
    """
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table class="{kind}">'
        f"<thead>{above}<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def details(summary: str, content: str) -> str:
    """Build a collapsed element that opens on a click on its summary."""
    return f"<details><summary>{summary}</summary>{content}</details>"
