"""Text into HTML: escaping, and the few pieces that every section is made of."""

import html
import re
from collections.abc import Iterable, Sequence

METRICS = {
    "ndcg": "NDCG", "map": "MAP", "recall": "Recall", "precision": "Precision",
    "hit": "Hit rate", "mrr": "MRR", "coverage": "Coverage",
}  # fmt: skip
HEADLINE = "ndcg@10"

# Controls that HTML cannot carry, or would change on the way; tab and newline pass as they are.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


def escape(text: object) -> str:
    r"""Make any text inert and exact in element content and quoted attributes; controls become visible escapes.

    Examples
    --------
    >>> escape('<b title="x">&')
    '&lt;b title=&quot;x&quot;&gt;&amp;'
    >>> escape("a\x00b")
    'a\\x00b'
    """
    clean = str(text).encode("utf-8", "backslashreplace").decode("utf-8")  # a file name may hold stray bytes
    return html.escape(CONTROL.sub(lambda match: ascii(match[0])[1:-1], clean), quote=True)


def value(number: float | None, form: str = ".4f") -> str:
    """A number as shown, with all its digits in the markup for those who read it by program."""
    return "–" if number is None else f'<data value="{number!r}">{number:{form}}</data>'


def table(label: str, heads: Iterable[str], rows: Iterable[Sequence[str]], above: str = "", kind: str = "") -> str:
    """A table in a box of its own, which scrolls (from the keyboard too) where the page is narrow.

    Parameters
    ----------
    label : plain text that a screen reader says for the table
    heads, rows : HTML of the cells; the first of a row is its heading
    above : row of headings over the ordinary ones, HTML
    kind : style class
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
    """Content that is folded away until asked for."""
    return f"<details><summary>{summary}</summary>{content}</details>"
