"""The section of sampled users: who is shown, and with which items."""

from pathlib import Path

import polars as pl

from drm_triton import Dataset
from tests.report.conftest import Node, evaluated, external_id, report, section


def test_recommendations_contain_no_seen_item_and_mark_every_hit(folder: Path, one: Node, tmp_path: Path) -> None:
    data = Dataset.load(folder / "songs")
    seen, held_out = data.train.union(data.valid), data.test
    per_user = tmp_path / "users.parquet"
    evaluated(folder / "dot", "--per-user", per_user)
    precision = dict(pl.read_parquet(per_user).select("user", "precision@10").iter_rows())
    articles = section(one, "users").all("article")
    assert len(articles) == len(precision)  # fewer than 200 users are evaluated, so all are shown
    for article in articles:
        user = data.user_ids.to_list().index(external_id(article).replace("\\x00", "\x00"))
        history, relevant = (set(data.item_ids[matrix.row(user)]) for matrix in (seen, held_out))
        (recommended,) = article.all("ol")
        ranked = {external_id(item): bool(item.all("span", "mark")) for item in recommended.all("li")}
        assert len(ranked) == 10
        assert not ranked.keys() & history
        assert {item for item, marked in ranked.items() if marked} == ranked.keys() & relevant
        assert round(10 * precision[data.user_ids[user]]) == sum(ranked.values())
        columns = {node.all("h4")[0].text.split()[0]: node.all("li") for node in article.all("section", "own")}
        assert {external_id(item) for item in columns["History"]} <= history
        assert len(columns["History"]) == min(len(history), 30)
        assert {external_id(item) for item in columns["Held"] if item.all("svg")} == ranked.keys() & relevant


def test_the_sample_covers_the_range_of_activity(folder: Path, two: Node) -> None:
    data = Dataset.load(folder / "songs")
    sizes = [int(link.all("span")[0].text) for link in section(two, "users").all("a")]
    activity = (data.train.degrees() + data.valid.degrees())[data.test.degrees() > 0]
    evaluated_activity = sorted(activity[activity >= 5].tolist())
    assert sizes == sorted(sizes)
    assert len(sizes) == 50
    assert (sizes[0], sizes[-1]) == (evaluated_activity[0], evaluated_activity[-1])
    assert abs(sizes[25] - evaluated_activity[len(evaluated_activity) // 2]) <= 2


def test_a_page_without_users(folder: Path, tmp_path: Path) -> None:
    page = report(tmp_path / "page", folder / "dot", "--users", 0)
    assert not section(page, "users").all("article")
