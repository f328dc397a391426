"""Generated interactions with planted structure, for demonstrations, tests and benchmarks.

Items belong to clusters. Each user has a few preferred clusters and draws most items from them; the rest is noise,
drawn from all items. Item popularity follows Zipf's law, within a cluster and overall. User activity is log-normal.
So popularity alone predicts something, and a model that finds the clusters predicts clearly more. As songs, the items
of a cluster share a genre and a few performers, so that the titles show what a model has found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton import atomic
from drm_triton.errors import DrmError, InputError

MELON_USERS, MELON_ITEMS, MELON_INTERACTIONS = 104_000, 81_200, 4_100_000

ZIPF = 0.8  # exponent of the items' popularity
ACTIVITY = 0.9  # standard deviation of the logarithm of the users' activity
NOISE = 0.1  # share of interactions drawn from all items
TASTES = (0.55, 0.25, 0.15, 0.05)  # shares of a user's preferred clusters in the rest
MAX_SHARE = 0.5  # no user has more than this share of the items

# Words for titles. A cluster has a mood and a genre; there are 400 pairs.
MOODS, GENRES, PERFORMERS, FIRST_WORDS, LAST_WORDS = (
    words.split()
    for words in (
        "Mellow Rainy Midnight Sunday Desert Velvet Northern Electric Golden Lonely "
        "Summer Island Winter Smoky Cosmic Gentle Street Harbour Dusty Neon",
        "Jazz Folk Techno Metal Soul Reggae Opera Blues House Country "
        "Punk Disco Tango Gospel Ska Funk Ambient Swing Polka Flamenco",
        "Trio Quartet Collective Orchestra Club",
        "Silver Broken Quiet Distant Paper Burning Hidden Crooked Silent Borrowed "
        "Painted Hollow Tender Restless Wild Faded Secret Amber Open Little",
        "River Window Letter Garden Train Mirror Season Highway Lantern Bridge "
        "Morning Harvest Shadow Station Ocean Promise Feather Corner Kingdom Echo",
    )
)


@dataclass(frozen=True)
class Shape:
    """The number of users, items and interactions to generate."""

    users: int
    items: int
    interactions: int

    def __post_init__(self) -> None:
        for name in ("users", "items", "interactions"):
            if getattr(self, name) < 1:
                raise InputError(f"synthetic data needs at least one of each: `{name}` is {getattr(self, name)}")
        least, most = max(self.users, self.items), self.users * self._most_per_user()
        if not least <= self.interactions <= most:
            raise InputError(
                f"{self.interactions:,} `interactions` do not fit {self.users:,} `users` and {self.items:,} `items`: "
                "each user and item needs at least one, and no user may have more than half of the items, so choose "
                f"between {least:,} and {most:,}"
            )
        if max(self.users, self.items) >= 2**31:
            raise InputError("synthetic data is limited to 2^31 users and items")

    def _most_per_user(self) -> int:
        return max(1, math.ceil(self.items * MAX_SHARE))

    @classmethod
    def melon(cls, scale: float = 1.0) -> Shape:
        """Return Melon's shape with users, items and interactions multiplied by `scale`."""
        return cls.scaled(MELON_USERS, MELON_ITEMS, MELON_INTERACTIONS, scale)

    @classmethod
    def scaled(cls, users: int, items: int, interactions: int, scale: float, most_density: float = 1.0) -> Shape:
        """Return a shape with users, items and interactions multiplied by `scale`.

        This keeps the average numbers of interactions of users and of items, so that the density grows as `scale`
        falls. Where it would be more than `most_density`, there are more items.
        """
        if not 0.001 <= scale <= 100:
            raise InputError(f"`scale` must be between 0.001 and 100, got {scale:g}")
        enough = math.ceil(interactions / users / most_density)
        return cls(round(users * scale), max(round(items * scale), enough), round(interactions * scale))


def generate(shape: Shape, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Generate interactions.

    Returns
    -------
    users, items : int64 [shape.interactions]
        Distinct pairs, sorted by user, then item. Every user and every item occurs.
    """
    rng = np.random.Generator(np.random.PCG64(seed % 2**64))
    n_users, n_items = shape.users, shape.items
    cluster_of, n_clusters = _clusters(rng, n_items)
    popularity = np.arange(1, n_items + 1, dtype=np.float64) ** -ZIPF
    # Items are sorted by cluster, and `mass` is the cumulative popularity before each item. A uniform number in the
    # interval of a cluster draws one of its items; a uniform number in the whole interval draws any item.
    mass = np.concatenate([[0.0], np.cumsum(popularity[rng.permutation(n_items)])])
    edges = np.searchsorted(cluster_of, np.arange(n_clusters + 1))
    weight = np.diff(mass[edges])
    tastes = rng.choice(n_clusters, size=(n_users, len(TASTES)), p=weight / weight.sum())

    def draw(users: NDArray[np.int64]) -> NDArray[np.int64]:
        taste = rng.choice(len(TASTES), size=len(users), p=TASTES)
        cluster = tastes[users, taste]
        low, high = mass[edges[cluster]], mass[edges[cluster + 1]]
        noisy = rng.random(len(users)) < NOISE
        low[noisy], high[noisy] = 0.0, mass[-1]
        at = low + rng.random(len(users)) * (high - low)
        items: NDArray[np.int64] = np.clip(np.searchsorted(mass, at, side="right") - 1, 0, n_items - 1)
        return items

    wanted = _activity(rng, shape)
    keys = _cover(rng, wanted, n_items)
    for attempt in range(1_000_000):
        missing = wanted - np.bincount(keys // n_items, minlength=n_users)
        users = np.repeat(np.arange(n_users), missing)
        if not len(users):
            break
        # A user who has all items of the preferred clusters would draw the same items forever, so after some attempts
        # items are drawn uniformly from all.
        items = draw(users) if attempt < 10 else rng.integers(n_items, size=len(users))
        new = np.sort(users * n_items + items)
        new = new[np.diff(new, prepend=-1) > 0]  # several times faster than np.unique, which hashes
        place = np.minimum(np.searchsorted(keys, new), len(keys) - 1)
        keys = np.sort(np.concatenate([keys, new[keys[place] != new]]), kind="stable")  # a merge of two sorted runs
    users, items = np.divmod(keys, n_items)
    return users, items


def write_melon(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write synthetic interactions as a Melon train.json, atomically."""
    users, items = generate(shape, seed)
    song_ids, rng = _song_ids(shape, seed)
    frame = (
        pl.DataFrame({"id": users, "songs": song_ids[items]})
        .group_by("id", maintain_order=True)
        .agg(pl.col("songs"))
        .select(
            tags=pl.concat_list(pl.format("tag {}", pl.col("id") % 97), pl.format("tag {}", pl.col("id") % 31)),
            id=pl.Series(rng.permutation(2 * shape.users)[: shape.users]),
            plylst_title=pl.format("playlist {}", "id"),
            songs="songs",
            like_cnt=pl.Series(rng.geometric(0.02, shape.users)),
            updt_date=pl.lit("2020-04-27 00:00:00.000"),
        )
    )
    _write_json(path, frame)


def write_song_meta(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write names and performers of the songs of `write_melon` as a Melon song_meta.json, atomically."""
    song_ids, _ = _song_ids(shape, seed)
    cluster, _ = _clusters(np.random.Generator(np.random.PCG64(seed % 2**64)), shape.items)
    place = np.arange(shape.items) - np.searchsorted(cluster, cluster)  # position within the cluster
    names = [_name(p, c) for c, p in zip(cluster.tolist(), place.tolist(), strict=True)]
    performers = [[f"{genre(c)} {PERFORMERS[p % len(PERFORMERS)]}"] for c, p in zip(cluster, place, strict=True)]
    _write_json(path, pl.DataFrame({"id": song_ids, "song_name": names, "artist_name_basket": performers}))


def genre(cluster: int) -> str:
    """Return the genre of a cluster.

    Examples
    --------
    >>> genre(0), genre(20), genre(400)
    ('Mellow Jazz', 'Rainy Jazz', 'Mellow Jazz 2')
    """
    turn, place = divmod(int(cluster), len(GENRES))
    again, shift = divmod(turn, len(MOODS))
    name = f"{MOODS[(place + shift) % len(MOODS)]} {GENRES[place]}"
    return f"{name} {again + 1}" if again else name


def _name(place: int, cluster: int) -> str:
    """Return the name of a song. Songs of a cluster have different names, and clusters start at different words."""
    turn, first = divmod(place, len(FIRST_WORDS))
    again, shift = divmod(turn, len(LAST_WORDS))
    name = f"{FIRST_WORDS[(first + cluster) % len(FIRST_WORDS)]} {LAST_WORDS[(first + shift) % len(LAST_WORDS)]}"
    return f"{name} {again + 1}" if again else name


def _clusters(rng: np.random.Generator, n_items: int) -> tuple[NDArray[np.int64], int]:
    """Draw the cluster of each item, ascending: int64 [n_items]. Also return the number of clusters."""
    n_clusters = max(2, round(math.sqrt(n_items / 2))) if n_items >= 8 else 1
    return np.sort(rng.integers(n_clusters, size=n_items)), n_clusters


def _song_ids(shape: Shape, seed: int) -> tuple[NDArray[np.int64], np.random.Generator]:
    """Draw ids like Melon's, neither consecutive nor sorted by popularity: int64 [items]. Also return the generator."""
    rng = np.random.Generator(np.random.PCG64([seed % 2**64, 1]))
    return rng.permutation(9 * shape.items)[: shape.items], rng


def _write_json(path: Path, frame: pl.DataFrame) -> None:
    try:
        atomic.write_file(path, frame.write_json, parents=True)
    except DrmError as error:
        raise InputError(str(error)) from error


def _activity(rng: np.random.Generator, shape: Shape) -> NDArray[np.int64]:
    """Draw the number of interactions of each user: int64 [users], log-normal, at least 1, with the exact sum."""
    most = shape._most_per_user()
    activity = rng.lognormal(0.0, ACTIVITY, shape.users)
    wanted = np.ones(shape.users, dtype=np.int64)
    while (rest := shape.interactions - int(wanted.sum())) > 0:
        open_to = np.flatnonzero(wanted < most)
        extra = rest * activity[open_to] / activity[open_to].sum()
        more = np.floor(extra).astype(np.int64)
        by_fraction = np.argsort(more - extra, kind="stable")
        more[by_fraction[: rest - int(more.sum())]] += 1
        wanted[open_to] = np.minimum(wanted[open_to] + more, most)
    return wanted


def _cover(rng: np.random.Generator, wanted: NDArray[np.int64], n_items: int) -> NDArray[np.int64]:
    """Give each item to one user, within the users' counts: sorted keys user * n_items + item."""
    slots = rng.permutation(np.repeat(np.arange(len(wanted)), wanted))[:n_items]
    return np.sort(slots * n_items + np.arange(n_items))
