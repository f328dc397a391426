"""Generated interactions."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from drm_triton import Dataset
from drm_triton.data.prepare.synthetic import Shape, generate, genre, write_melon, write_song_meta
from drm_triton.errors import InputError


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    users, items = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    most = users * max(1, -(-items // 2))
    least = max(users, items)
    if least > most:
        items = users * max(1, items // 2)
        items = min(items, 60)
        least, most = max(users, items), users * max(1, -(-items // 2))
    return Shape(users, items, draw(st.integers(least, max(least, most)))) if least <= most else Shape(3, 3, 5)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 2**40))
def test_the_shape_is_exact(shape: Shape, seed: int) -> None:
    users, items = generate(shape, seed)
    assert len(users) == shape.interactions
    assert len(set(zip(users.tolist(), items.tolist(), strict=True))) == shape.interactions
    assert set(users.tolist()) == set(range(shape.users))
    assert set(items.tolist()) == set(range(shape.items))


def test_seeds() -> None:
    shape = Shape(50, 40, 500)
    assert (generate(shape, 1)[1] == generate(shape, 1)[1]).all()
    assert (generate(shape, 1)[1] != generate(shape, 2)[1]).any()


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="choose between 10 and 50"):
        Shape(10, 10, 51)
    with pytest.raises(InputError, match="at least one"):
        Shape(0, 10, 10)
    with pytest.raises(InputError, match="`scale`"):
        Shape.melon(0)


def test_popularity_is_skewed_and_activity_too() -> None:
    users, items = generate(Shape.melon(0.02), 0)
    popularity = np.sort(np.bincount(items))[::-1]
    assert popularity[: len(popularity) // 10].sum() > 0.3 * len(items)
    activity = np.bincount(users)
    assert activity.max() > 5 * np.median(activity)


def test_a_factor_model_beats_popularity() -> None:
    """The planted structure can be learned: truncated SVD ranks held-out items far better than popularity does."""
    from scipy.sparse.linalg import svds

    users, items = generate(Shape.melon(0.01), 0)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))
    train = data.train.to_scipy(np.float64)
    left, values, right = svds(train, k=16, v0=np.ones(min(train.shape)))
    popularity = np.tile(np.asarray(train.sum(axis=0)), (data.n_users, 1))
    assert recall(data, (left * values) @ right) > 1.5 * recall(data, popularity)


def recall(data: Dataset, scores: NDArray[Any], k: int = 10) -> float:
    scores = np.array(scores)
    hits = []
    for u in range(data.n_users):
        held_out = data.test.row(u)
        if len(held_out):
            scores[u, data.train.row(u)] = -np.inf
            hits.append(np.isin(np.argsort(-scores[u], kind="stable")[:k], held_out).sum() / min(k, len(held_out)))
    return float(np.mean(hits))


def test_melon_file_is_like_the_real_one(tmp_path: Path) -> None:
    write_melon(tmp_path / "raw" / "train.json", Shape(30, 20, 120), seed=3)
    playlists = json.loads((tmp_path / "raw" / "train.json").read_text("utf-8"))
    assert len(playlists) == 30
    assert set(playlists[0]) == {"id", "songs", "tags", "plylst_title", "like_cnt", "updt_date"}
    assert isinstance(playlists[0]["tags"], list)
    assert sum(len(p["songs"]) for p in playlists) == 120
    assert len({song for p in playlists for song in p["songs"]}) == 20
    assert [f.name for f in (tmp_path / "raw").iterdir()] == ["train.json"]


def test_a_song_is_named_once_and_by_its_cluster(tmp_path: Path) -> None:
    shape = Shape(300, 900, 6000)
    write_melon(tmp_path / "train.json", shape, seed=3)
    write_song_meta(tmp_path / "song_meta.json", shape, seed=3)
    songs = json.loads((tmp_path / "song_meta.json").read_text("utf-8"))
    playlists = json.loads((tmp_path / "train.json").read_text("utf-8"))
    assert {song["id"] for song in songs} == {song for playlist in playlists for song in playlist["songs"]}
    titles = {song["id"]: (song["song_name"], *song["artist_name_basket"]) for song in songs}
    assert len(set(titles.values())) == len(songs)
    # A user's songs are mostly of a few clusters, so their genres, the performers' first words, are few as well.
    genres = {song: artist.rsplit(" ", 1)[0] for song, (_, artist) in titles.items()}
    played = [Counter(genres[song] for song in playlist["songs"]) for playlist in playlists]
    share = sum(count for tally in played for _, count in tally.most_common(3)) / 6000
    assert share > 0.6  # three genres drawn at random out of 21 would be a good 0.3 of so short lists


def test_genres_do_not_repeat() -> None:
    assert len({genre(cluster) for cluster in range(2100)}) == 2100


def test_a_scaled_shape_keeps_the_averages_up_to_a_density() -> None:
    assert Shape.scaled(1000, 500, 20_000, 0.1) == Shape(100, 50, 2000)
    assert Shape.scaled(1000, 500, 20_000, 0.1, most_density=0.05) == Shape(100, 400, 2000)  # 20 per user, of 400
    with pytest.raises(InputError, match="`scale` must be between"):
        Shape.scaled(1000, 500, 20_000, 0)
