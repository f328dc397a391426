"""The section of sampled users: history, held-out items and the recommendations of each run."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drm_triton.data.csr import by_popularity
from drm_triton.ranking.evaluate import membership
from drm_triton.report import svg
from drm_triton.report.markup import escape
from drm_triton.report.measure import MeasuredRun, RunData, data_of

MAX_ITEMS = 30  # shown of a history and of the held-out items
HIT = '<span class="mark" aria-hidden="true">✓</span><span class="visually-hidden"> held out</span>'


def users_section(runs: Sequence[MeasuredRun]) -> str:
    """Build, for each data set, an index of the sampled users and one article for each user."""
    datasets = data_of(runs)
    content = ""
    for position, data in enumerate(datasets):
        numbered = [(number, run) for number, run in enumerate(runs, 1) if run.data is data]
        if len(datasets) > 1:
            content += f"<h3>On <bdi>{escape(data.name)}</bdi></h3>"
        content += _Browser(position, data, numbered, level=4 if len(datasets) > 1 else 3).html()
    return content


class _Browser:
    """The users of one data set. The script shows one article at a time; without it all are visible."""

    def __init__(self, position: int, data: RunData, runs: Sequence[tuple[int, MeasuredRun]], level: int) -> None:
        self.position, self.data, self.runs, self.level = position, data, runs, level
        self.ids = data.dataset.item_ids
        self.titles = data.dataset.item_titles
        self.popularity = data.seen.popularity()
        self.hits = [membership(run.recommendations, data.held_out.take(data.sample)) for _, run in runs]

    def html(self) -> str:
        index, articles = [], []
        history = self.data.seen.degrees()
        for row, user in enumerate(self.data.sample):
            name = escape(self.data.dataset.user_ids[int(user)])
            anchor = f"user-{self.position}-{row}"
            index.append(f'<li><a href="#{anchor}"><bdi class="id">{name}</bdi><span>{history[user]:,}</span></a></li>')
            articles.append(self._article(row, int(user), name, anchor))
        field = f"find-{self.position}"
        return (
            '<div class="browser"><div class="finder">'
            f'<label for="{field}">Find a user</label><input type="search" id="{field}" autocomplete="off" disabled>'
            f'<p class="status" role="status">{len(index)} users, with their number of interactions</p>'
            f'<ol class="index">{"".join(index)}</ol></div><div class="shown">{"".join(articles)}</div></div>'
        )

    def _article(self, row: int, user: int, name: str, anchor: str) -> str:
        h = f"h{self.level}"
        columns = [
            self._recommendations(row, number, run, hits)
            for (number, run), hits in zip(self.runs, self.hits, strict=True)
        ]
        if self.data.on is not None:
            columns.append(self._held_out(row, user))
        columns.append(self._history(user))
        kind = "columns several" if len(self.runs) > 1 else "columns"
        return (
            f'<article id="{anchor}" aria-labelledby="{anchor}-name"><{h} id="{anchor}-name">User '
            f'<bdi class="id">{name}</bdi></{h}><div class="{kind}">{"".join(columns)}</div></article>'
        )

    def _history(self, user: int) -> str:
        """List the items by popularity. A long history shows MAX_ITEMS of them, evenly spaced."""
        items = by_popularity(self.popularity, self.data.seen.row(user))
        shown = items
        if len(items) > MAX_ITEMS:
            shown = items[np.linspace(0, len(items) - 1, MAX_ITEMS).round().astype(np.int64)]
        return self._list("ul", f"History{_count(len(shown), len(items))}", [self._item(item) for item in shown])

    def _held_out(self, row: int, user: int) -> str:
        """List the held-out items with the markers of the runs that recommended them."""
        items = by_popularity(self.popularity, self.data.held_out.row(user))
        markers = {int(item): "" for item in items}
        for (number, run), hits in zip(self.runs, self.hits, strict=True):
            for item in run.recommendations[row][hits[row]]:
                hidden = f'<span class="visually-hidden"> recommended by {escape(run.name)}</span>'
                markers[int(item)] += svg.swatch(number) + hidden
        shown = sorted(items.tolist(), key=lambda item: not markers[item])[:MAX_ITEMS]  # stable: recommended first
        lines = [self._item(item) + markers[item] for item in shown]
        return self._list("ul", f"Held out{_count(len(shown), len(items))}", lines)

    def _recommendations(self, row: int, number: int, run: MeasuredRun, hits: NDArray[np.bool_]) -> str:
        ranked = [(item, hit) for item, hit in zip(run.recommendations[row], hits[row], strict=True) if item >= 0]
        lines = [self._item(item) + (HIT if hit else "") for item, hit in ranked]
        n = int(hits[row].sum())
        count = "" if run.evaluation is None else f" <small>{n} hit{'s' if n != 1 else ''}</small>"
        return self._list("ol", svg.run_label(number, run.name) + count, lines)

    def _list(self, tag: str, heading: str, lines: Sequence[str]) -> str:
        h = f"h{self.level + 1}"
        kind = ' class="own"' if tag == "ul" else ""  # items of the user, not a ranking
        body = "".join(f"<li>{line}</li>" for line in lines) or "<li>none</li>"
        return f"<section{kind}><{h}>{heading}</{h}><{tag}>{body}</{tag}></section>"

    def _item(self, item: int) -> str:
        code = f'<bdi class="id">{escape(self.ids[int(item)])}</bdi>'
        title = None if self.titles is None else self.titles[int(item)]
        return f"<bdi>{escape(title)}</bdi> {code}" if title else code


def _count(shown: int, total: int) -> str:
    return f" <small>{total:,}</small>" if shown == total else f" <small>{shown} of {total:,}</small>"
