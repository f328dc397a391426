"""The sample of users: what each has, what was held out, and what each run recommends."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drm_triton.ranking.evaluate import membership
from drm_triton.report import svg
from drm_triton.report.markup import escape
from drm_triton.report.measure import Data, Measured, data_of

MOST_ITEMS = 30  # shown of a history, and of what was held out
HIT = '<span class="mark" aria-hidden="true">✓</span><span class="unseen"> held out</span>'


def users_section(runs: Sequence[Measured]) -> str:
    """For each data set an index of the sampled users and an article for each of them."""
    sets = data_of(runs)
    content = ""
    for at, data in enumerate(sets):
        numbered = [(number, run) for number, run in enumerate(runs, 1) if run.data is data]
        if len(sets) > 1:
            content += f"<h3>On <bdi>{escape(data.name)}</bdi></h3>"
        content += _Browser(at, data, numbered, level=4 if len(sets) > 1 else 3).html()
    return content


class _Browser:
    """The users of one data set. Without its script the page shows the index and every article below one another."""

    def __init__(self, at: int, data: Data, runs: Sequence[tuple[int, Measured]], level: int) -> None:
        self.at, self.data, self.runs, self.level = at, data, runs, level
        self.ids = data.dataset.item_ids
        self.titles = data.dataset.item_titles
        self.popularity = np.bincount(data.seen.indices, minlength=data.dataset.n_items)
        self.hits = [membership(run.top, data.held_out.take(data.sample)) for _, run in runs]

    def html(self) -> str:
        index, articles = [], []
        history = self.data.seen.degrees()
        for row, user in enumerate(self.data.sample):
            name = escape(self.data.dataset.user_ids[int(user)])
            anchor = f"user-{self.at}-{row}"
            index.append(f'<li><a href="#{anchor}"><bdi class="id">{name}</bdi><span>{history[user]:,}</span></a></li>')
            articles.append(self._article(row, int(user), name, anchor))
        field = f"find-{self.at}"
        return (
            '<div class="browser"><div class="finder">'
            f'<label for="{field}">Find a user</label><input type="search" id="{field}" autocomplete="off" disabled>'
            f'<p class="status" role="status">{len(index)} users, with the size of their history</p>'
            f'<ol class="index">{"".join(index)}</ol></div><div class="shown">{"".join(articles)}</div></div>'
        )

    def _article(self, row: int, user: int, name: str, anchor: str) -> str:
        h = f"h{self.level}"
        lists = [self._top(row, number, run, hits) for (number, run), hits in zip(self.runs, self.hits, strict=True)]
        if self.data.on is not None:
            lists.append(self._held_out(row, user))
        lists.append(self._history(user))
        kind = "lists several" if len(self.runs) > 1 else "lists"
        return (
            f'<article id="{anchor}" aria-labelledby="{anchor}-name"><{h} id="{anchor}-name">User '
            f'<bdi class="id">{name}</bdi></{h}><div class="{kind}">{"".join(lists)}</div></article>'
        )

    def _history(self, user: int) -> str:
        """Items from the best known to the least; of a long history some, evenly spaced in that order."""
        items = self._by_popularity(self.data.seen.row(user))
        shown = items
        if len(items) > MOST_ITEMS:
            shown = items[np.linspace(0, len(items) - 1, MOST_ITEMS).round().astype(np.int64)]
        return self._list("ul", f"History{_of(len(shown), len(items))}", [self._item(item) for item in shown])

    def _held_out(self, row: int, user: int) -> str:
        """Relevant items, with the markers of the runs that found them."""
        items = self._by_popularity(self.data.held_out.row(user))
        found = {int(item): "" for item in items}
        for (number, run), hits in zip(self.runs, self.hits, strict=True):
            for item in run.top[row][hits[row]]:
                found[int(item)] += svg.swatch(number) + f'<span class="unseen"> found by {escape(run.name)}</span>'
        shown = sorted(items.tolist(), key=lambda item: not found[item])[:MOST_ITEMS]  # stable: found ones first
        lines = [self._item(item) + found[item] for item in shown]
        return self._list("ul", f"Held out{_of(len(shown), len(items))}", lines)

    def _top(self, row: int, number: int, run: Measured, hits: NDArray[np.bool_]) -> str:
        ranked = [(item, hit) for item, hit in zip(run.top[row], hits[row], strict=True) if item >= 0]
        lines = [self._item(item) + (HIT if hit else "") for item, hit in ranked]
        n = int(hits[row].sum())
        said = "" if run.evaluation is None else f" <small>{n} hit{'s' if n != 1 else ''}</small>"
        return self._list("ol", svg.named(number, run.name) + said, lines)

    def _list(self, tag: str, heading: str, lines: Sequence[str]) -> str:
        h = f"h{self.level + 1}"
        kind = ' class="own"' if tag == "ul" else ""  # what is the user's own, not a ranking
        body = "".join(f"<li>{line}</li>" for line in lines) or "<li>none</li>"
        return f"<section{kind}><{h}>{heading}</{h}><{tag}>{body}</{tag}></section>"

    def _by_popularity(self, items: NDArray[np.int32]) -> NDArray[np.int32]:
        return items[np.argsort(-self.popularity[items], kind="stable")]

    def _item(self, item: int) -> str:
        code = f'<bdi class="id">{escape(self.ids[int(item)])}</bdi>'
        title = None if self.titles is None else self.titles[int(item)]
        return f"<bdi>{escape(title)}</bdi> {code}" if title else code


def _of(shown: int, total: int) -> str:
    return f" <small>{total:,}</small>" if shown == total else f" <small>{shown} of {total:,}</small>"
