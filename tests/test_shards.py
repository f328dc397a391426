"""Shards of the users: together they are the whole model, and each holds its own users only."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import safetensors.torch

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.data.shard import Shard
from drm_triton.errors import InputError
from drm_triton.models import BPR, CDAE, EASE, load
from drm_triton.recommender import Recommender
from drm_triton.recommender.shards import described, load_shard
from drm_triton.training import checkpoint, tensor_file
from tests.conftest import rot

SHARDS = [1, 2, 3, 7, 64]  # 64: more shards than users


def interactions() -> pl.DataFrame:
    users, items = generate(Shape(users=60, items=50, interactions=600), 1)
    return pl.DataFrame({"user": [f"u{u:02}" for u in users], "item": 10 * items})


def split_data() -> Dataset:
    """Return data with held-out interactions, a user who has no others, an item with none, and a user without any."""
    data = Dataset.from_frame(interactions(), ratios=(0.7, 0.15, 0.15))
    extra = pl.DataFrame({"user": ["u90", "u91"]})
    return data.with_attributes(pl.DataFrame({"item": [9999]}), extra)


def joined(path: Path, count: int, **options: Any) -> pl.DataFrame:
    parts = [load_shard(path, Shard(index, count)) for index in range(count)]
    return pl.concat([pl.concat(part.recommend_blocks(**options)) for part in parts])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "drm"
    DRM(factors=8, epochs=3).fit(split_data()).save(path)
    return path


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("count", SHARDS)
def test_the_union_of_all_shards_is_the_whole(saved: Path, count: int) -> None:
    whole = DRM.load(saved).recommend(k=49)
    assert len(whole) > 2000
    assert joined(saved, count, k=49).equals(whole)


@pytest.mark.filterwarnings("ignore:.*only.*", "ignore:skipped")
@pytest.mark.parametrize(
    "options",
    [
        {"exclude_seen": False, "k": 3},
        {"unknown": "popular"},
        {"without": [10, 20], "diversity": 0.3},
        {"only": {"u05": [10, 20, 30], "u41": [40, 50, 60, 70]}},  # nobody in most shards
        {"only": {"u05": [10, 20, 30], "u41": [40, 50, 60, 70]}, "without": [10, 20, 30], "exclude_seen": False},
    ],
    ids=str,
)
def test_rules_hold_across_shards(saved: Path, options: dict[str, Any]) -> None:
    whole = DRM.load(saved).recommend(**options)
    assert len(whole)
    assert joined(saved, 7, **options).equals(whole)


@pytest.mark.parametrize("kind", [EASE, BPR, CDAE])
def test_other_models(kind: type[Recommender[Any]], tmp_path: Path) -> None:
    options = {} if kind is EASE else {"factors": 4, "epochs": 2}
    kind(**options).fit(Dataset.from_frame(interactions())).save(tmp_path / "model")
    whole = load(tmp_path / "model").recommend(k=5)
    assert joined(tmp_path / "model", 3, k=5).equals(whole)


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_vectors_predicted_from_attributes_are_those_of_the_whole_model(score: str, tmp_path: Path) -> None:
    items = pl.DataFrame({"item": np.arange(60) * 10, "genre": [f"g{i % 4}" for i in range(60)]})
    users = pl.DataFrame({"user": [f"u{u:02}" for u in range(70)], "country": [f"c{u % 3}" for u in range(70)]})
    data = Dataset.from_frame(interactions()).with_attributes(items, users)
    DRM(score=score, factors=4, epochs=2).fit(data).save(tmp_path / "model")
    whole = load(tmp_path / "model").recommend(k=55)
    assert whole["cold"].any()
    parts = joined(tmp_path / "model", 4, k=55)
    assert parts.equals(whole)


def test_a_shard_holds_its_own_users_only(saved: Path) -> None:
    whole = DRM.load(saved)
    part = load_shard(saved, Shard(2, 4))
    assert isinstance(part, DRM)
    users = Shard(2, 4).users(whole.interactions.n_users)
    assert part.user_factors.shape == (len(users), 8)
    assert part.interactions.user_ids.equals(whole.interactions.user_ids[users.start : users.stop])
    assert part.interactions.n_interactions < whole.interactions.n_interactions / 2
    assert part.interactions.n_items == whole.interactions.n_items
    assert part.item_factors.equal(whole.item_factors)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    DRM(factors=4, epochs=1).fit(Dataset.from_frame(interactions())).save(tmp_path / "model")
    load_shard(tmp_path / "model", Shard(0, 2))
    file = tmp_path / "model" / checkpoint.FILE
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="does not have the checksum that it records"):
        load_shard(tmp_path / "model", Shard(0, 2))


@pytest.mark.parametrize("attributes", [None, pl.DataFrame({"item": [10], "genre": ["jazz"]})])
def test_verify_reads_the_interactions_again(tmp_path: Path, attributes: pl.DataFrame | None) -> None:
    path = tmp_path / "model"
    data = Dataset.from_frame(interactions(), ratios=(1, 0, 0)).with_attributes(attributes)
    DRM(factors=4, epochs=1).fit(data).save(path)
    ways = (
        lambda verify: load_shard(path, Shard(0, 2), verify),
        lambda verify: load(path, verify=verify),
        lambda verify: DRM.load(path, verify=verify),
    )
    for way in ways:
        way(True)
    for way in ways:
        rot(path / "data")
        way(False)
        with pytest.raises(InputError, match=rf"{path / 'data'} is damaged: its content"):
            way(True)


def test_models_without_a_checksum_are_told_apart(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        path = tmp_path / str(seed)
        DRM(factors=4, epochs=1, seed=seed).fit(Dataset.from_frame(interactions())).save(path)
        tensors = safetensors.torch.load_file(path / checkpoint.FILE)
        with safetensors.safe_open(path / checkpoint.FILE, framework="pt") as opened:
            about = {tensor_file.ABOUT: opened.metadata()[tensor_file.ABOUT].replace(f'"seed": {seed}', '"seed": 0')}
        safetensors.torch.save_file(tensors, path / checkpoint.FILE, metadata=about)  # as version 0.2 did
        assert load_shard(path, Shard(0, 2)).interactions.n_users > 0
        says = r"cannot be verified: files of version 0\.2 record no checksum; leave out `verify`"
        with pytest.raises(InputError, match=says):
            load_shard(path, Shard(0, 2), verify=True)
        with pytest.raises(InputError, match=says):
            load(path, verify=True)
        found.append(described(path))
    assert found[0]["data"] == found[1]["data"]
    assert found[0]["model"] != found[1]["model"]


@pytest.mark.parametrize("n_users", [0, 1, 10, 97])
def test_shards_are_consecutive_and_even(n_users: int) -> None:
    for count in (1, 3, 7, 200):
        ranges = [Shard(index, count).users(n_users) for index in range(count)]
        assert [user for users in ranges for user in users] == list(range(n_users))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "must be i/n"),
        ("a/b", "must be i/n"),
        ("-1/4", "must be i/n"),
        ("1/4/7", "must be i/n"),
        ("", "must be i/n"),
        ("4/4", "numbered from 0, so n = 4 has 0/4 .. 3/4"),
        ("0/0", "n must be at least 1"),
    ],
)
def test_bad_shards(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Shard.parse(text)
