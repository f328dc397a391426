"""Griffe extension: read this project's docstrings for the API reference.

Many docstrings write `name : description`, because the signature already has the type. NumPy's convention reads the
text after the colon as a type. This extension moves it to the description unless it is a type. The reference then shows
the type of the signature, and the text.
"""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*) : (.+)$", re.MULTILINE)
# What NumPy's convention puts after the colon: `int, default 64`, `{"dot", "l2"}`, `Dataset`.
TYPE = re.compile(r"(\{.*\}|[\w.]+(\[.*\])?( \| [\w.]+(\[.*\])?)*)(, (optional|default\b.*))?")


class DescriptionsFirst(griffe.Extension):
    """Rewrite the sections Parameters, Attributes and Returns before Griffe parses a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object after it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(docstring: str) -> str:
    r"""Move the text after a colon from the type to the description.

    Examples
    --------
    >>> rewritten("Rank.\n\nParameters\n----------\nk : items per user\n")
    'Rank.\n\nParameters\n----------\nk\n    items per user\n'
    """
    pieces = SECTION.split(docstring)  # text before the first section, then title and body of each
    result = [pieces[0]]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if title in ("Parameters", "Attributes"):
            result.append(f"{title}\n{'-' * len(title)}\n{ENTRY.sub(_entry, body)}")
        elif title == "Returns":
            result.append(f"{title}\n{'-' * len(title)}\n{_returns(body)}")
        else:
            result.append(f"{title}\n{'-' * len(title)}\n{body}")
    return "".join(result)


def _entry(match: re.Match[str]) -> str:
    return match[0] if TYPE.fullmatch(match[2]) else f"{match[1]}\n    {match[2]}"


def _returns(body: str) -> str:
    """Give each entry of a Returns section a name and no type: Griffe then takes the type from the signature."""
    entries = re.split(r"\n(?=\S)", body.strip("\n"))
    texts = [" ".join(line.strip() for line in entry.splitlines()) for entry in entries]
    named = [ENTRY.fullmatch(text) for text in texts]
    parts = [(match[1], match[2]) if match else ("result", text) for match, text in zip(named, texts, strict=True)]
    return "".join(f"{name} :\n    {text}\n" for name, text in parts) + "\n"
