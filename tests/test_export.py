"""Exports, read as another program would read them, give the recommendations of the model."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from drm_triton import DRM, Dataset
from drm_triton import export as module
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import InputError
from drm_triton.export import export
from drm_triton.names import ExportFormat

INDEXES = [
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is not installed"))
    for name in ("faiss", "hnswlib")
]
FORMATS = ["npz", "parquet", *INDEXES]


def fitted(score: str, text: bool = True, items: int = 400) -> DRM:
    users, liked = generate(Shape(users=150, items=items, interactions=20 * items), 0)
    names = {"user": [f"ü{u}" for u in users], "item": [f"song {i}" for i in liked]}
    data = Dataset.from_frame(pl.DataFrame(names if text else {"user": users * 10**12, "item": liked - 7}))
    return DRM(factors=12, epochs=2, score=score).fit(data)


@pytest.fixture(scope="module", params=["dot", "l2"])
def model(request: pytest.FixtureRequest) -> DRM:
    return fitted(request.param)


def scores(U: NDArray[Any], V: NDArray[Any], score: str) -> NDArray[Any]:
    table: NDArray[Any] = U @ V.T if score == "dot" else -((U[:, None] - V[None]) ** 2).sum(-1)
    return table


def same_recommendations(model: DRM, U: Any, V: Any, user_ids: Any, item_ids: Any, owned: list[Any]) -> None:
    """Rank by the exported factors without the owned items; the ids must be those of `recommend`."""
    table = scores(U.astype(np.float64), V.astype(np.float64), model.config.score_in_force)
    assert sum(map(len, owned)) == model.interactions.n_interactions
    for u in range(len(U)):
        table[u, owned[u]] = -np.inf
    best = np.argsort(-table, axis=1)[:, :10]
    expected = model.recommend(k=10)
    ours = pl.DataFrame({"user": np.repeat(user_ids, 10), "item": np.asarray(item_ids)[best].ravel()})
    assert ours["user"].to_list() == expected["user"].to_list()
    agree = np.mean((ours["item"] == expected["item"]).to_numpy())
    assert agree > 0.999  # float32 sums may swap two items with nearly equal scores
    assert np.allclose(np.take_along_axis(table, best, 1).ravel(), expected["score"], atol=1e-5)


def test_npz_gives_the_same_recommendations(model: DRM, tmp_path: Path) -> None:
    manifest = export(model, tmp_path / "x", to="npz")
    with np.load(tmp_path / "x" / "factors.npz", allow_pickle=False) as file:
        assert set(file.files) == {"user_factors", "item_factors", "user_ids", "item_ids"}
        assert file["user_factors"].dtype == file["item_factors"].dtype == np.float32
        assert file["item_ids"].dtype.kind == "U"
        with np.load(tmp_path / "x" / "owned.npz", allow_pickle=False) as pairs:
            owned = np.split(pairs["items"], pairs["indptr"][1:-1])
        U, V, user_ids, item_ids = (file[n] for n in ("user_factors", "item_factors", "user_ids", "item_ids"))
        same_recommendations(model, U, V, user_ids, item_ids, owned)
    assert manifest == json.loads((tmp_path / "x" / "export.json").read_text("utf-8"))
    assert (manifest["score"], manifest["dimension"], manifest["users"]) == (model.config.score_in_force, 12, 150)


def test_integer_ids_stay_integers(tmp_path: Path) -> None:
    model = fitted("dot", text=False)
    export(model, tmp_path / "x")
    with np.load(tmp_path / "x" / "factors.npz", allow_pickle=False) as file:
        assert file["user_ids"].dtype == file["item_ids"].dtype == np.int64
        assert file["user_ids"].max() == 149 * 10**12
        assert file["item_ids"].tolist() == model.interactions.item_ids.to_list()


def test_parquet_gives_the_same_recommendations(model: DRM, tmp_path: Path) -> None:
    export(model, tmp_path / "x", to="parquet")
    users, items = (pl.read_parquet(tmp_path / "x" / f"{name}.parquet") for name in ("users", "items"))
    assert items.schema == {"id": pl.String, "factors": pl.Array(pl.Float32, 12)}
    U, V = (table["factors"].to_numpy() for table in (users, items))
    pairs = pl.read_parquet(tmp_path / "x" / "owned.parquet").group_by("user").agg("item")
    has = dict(pairs.rows())
    rows = {item: row for row, item in enumerate(items["id"])}
    owned = [np.array([rows[item] for item in has[user]]) for user in users["id"]]
    same_recommendations(model, U, V, users["id"], items["id"], owned)


def test_parquet_has_the_titles(tmp_path: Path) -> None:
    model = fitted("dot")
    table = model.interactions.items.with_columns(title=pl.col("id").str.to_uppercase())
    model.interactions._items = table
    export(model, tmp_path / "x", to="parquet")
    assert pl.read_parquet(tmp_path / "x" / "items.parquet")["title"].to_list() == table["title"].to_list()
    assert pl.read_parquet(tmp_path / "x" / "users.parquet").columns == ["id", "factors"]


def search(folder: Path, queries: NDArray[Any], k: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Query the index as export.json says; return labels and scores of the model."""
    about = json.loads((folder / "export.json").read_text("utf-8"))
    if about["to"] == "faiss":
        faiss = pytest.importorskip("faiss")

        index = faiss.read_index(str(folder / "index.faiss"))
        assert index.hnsw.efSearch == about["ef"]
        found, labels = index.search(queries, k)
        return labels, found if about["score"] == "dot" else -found
    hnswlib = pytest.importorskip("hnswlib")

    index = hnswlib.Index(space="ip" if about["score"] == "dot" else "l2", dim=about["dimension"])
    index.load_index(str(folder / "index.hnsw"))
    index.set_ef(max(about["ef"], k))
    labels, found = index.knn_query(queries, k)
    return labels.astype(np.int64), 1 - found if about["score"] == "dot" else -found


@pytest.mark.parametrize("to", INDEXES)
def test_an_index_finds_the_recommendations(model: DRM, to: ExportFormat, tmp_path: Path) -> None:
    manifest = export(model, tmp_path / "x", to=to)
    queries = np.load(tmp_path / "x" / "user_factors.npy", allow_pickle=False)
    labels, found = search(tmp_path / "x", queries, 10)
    exact = np.sort(scores(queries, model.item_factors.numpy(), model.config.score_in_force), axis=1)[:, ::-1]
    assert (np.abs(found - exact[:, :10]) < 1e-5).mean() >= 0.95
    assert (np.diff(found) <= 1e-6).all()
    item_ids, user_ids = (np.load(tmp_path / "x" / f"{n}_ids.npy", allow_pickle=False) for n in ("item", "user"))
    expected = model.recommend(k=10, exclude_seen=False)
    assert np.repeat(user_ids, 10).tolist() == expected["user"].to_list()
    assert (item_ids[labels].ravel() == expected["item"].to_numpy()).mean() >= 0.9
    assert min(manifest["recall@10"], manifest["recall@50"]) >= 0.95


@pytest.mark.parametrize("to", INDEXES)
def test_the_manifest_has_the_real_recall(to: ExportFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a poor graph and a narrow search, so that the index misses many items
    for name, value in (("LINKS", 4), ("EF_CONSTRUCTION", 4), ("FIRST_EF", 50), ("LAST_EF", 50)):
        monkeypatch.setattr(module, name, value)
    model = fitted("l2", items=2000)
    manifest = export(model, tmp_path / "x", to=to)
    queries = np.load(tmp_path / "x" / "user_factors.npy")
    labels, _ = search(tmp_path / "x", queries, 50)
    exact = np.argsort(-scores(queries, model.item_factors.numpy(), "l2"), axis=1)
    for k in (10, 50):
        shares = [len(set(a[:k]) & set(b[:k])) / k for a, b in zip(labels, exact, strict=True)]
        assert manifest[f"recall@{k}"] == pytest.approx(np.mean(shares), abs=1e-3)
    assert manifest["recall@50"] < 0.95


@pytest.mark.parametrize("to", INDEXES)
def test_ef_grows_until_the_recall_is_good(to: ExportFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINKS", 4)
    monkeypatch.setattr(module, "FIRST_EF", 1)
    manifest = export(fitted("dot", items=2000), tmp_path / "x", to=to)
    assert manifest["ef"] > 50
    assert min(manifest["recall@10"], manifest["recall@50"]) >= 0.95


@pytest.mark.parametrize("to", INDEXES)
def test_fewer_items_than_k_and_items_with_equal_scores(to: ExportFormat, tmp_path: Path) -> None:
    data = Dataset.from_csr(([0, 1, 2], [0, 1]), n_items=7)
    model = DRM(factors=4, epochs=1).fit(data)
    model.item_factors[2:] = model.item_factors[2]  # an index may return any of these
    manifest = export(model, tmp_path / "x", to=to)
    assert (manifest["recall@10"], manifest["recall@50"]) == (1.0, 1.0)


@pytest.mark.parametrize("to", ["faiss", "hnswlib"])
def test_a_missing_package_is_named(to: ExportFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, to, None)
    with pytest.raises(InputError, match=re.escape(f"pip install 'drm-triton[{to}]'")):
        export(fitted("dot"), tmp_path / "x", to=to)
    assert list(tmp_path.iterdir()) == []


def test_only_an_export_is_replaced(tmp_path: Path) -> None:
    model, place = fitted("dot"), tmp_path / "x"
    export(model, place, to="npz")
    with pytest.raises(InputError, match="already exists"):
        export(model, place, to="parquet")
    export(model, place, to="parquet", overwrite=True)
    assert sorted(p.name for p in place.iterdir()) == ["export.json", "items.parquet", "owned.parquet", "users.parquet"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(InputError, match="not made by this program"):
        export(model, tmp_path / "mine", overwrite=True)
    with pytest.raises(InputError, match="to must be one of npz, parquet, faiss, hnswlib, got 'annoy'"):
        export(model, tmp_path / "y", to="annoy")  # type: ignore[arg-type]


# NumPy before 2.2 leaves the file of `savez` to the garbage collector, which cannot close it either.
@pytest.mark.filterwarnings("ignore:.*ZipFile.__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_leaves_nothing(to: ExportFormat, tmp_path: Path) -> None:
    import resource

    model = fitted("dot")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Users fit, items do not. Python ignores the signal, so a write over the limit fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        with pytest.raises(InputError, match="free some space"):
            export(model, tmp_path / "x", to=to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_ids_that_an_array_would_change_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.from_csr(([0, 1, 2], [0, 1]), user_ids=["ann", "bob\0"])
    model = DRM(factors=4, epochs=1).fit(data)
    with pytest.raises(InputError, match=r"the user ids do not fit in a NumPy array of text .* export to parquet"):
        export(model, tmp_path / "x")
    export(model, tmp_path / "x", to="parquet")
    assert pl.read_parquet(tmp_path / "x" / "users.parquet")["id"].to_list() == ["ann", "bob\0"]
    monkeypatch.setattr(module, "MAX_ID_BYTES", 1000)
    with pytest.raises(InputError, match="150 ids of up to 4 characters"):
        export(fitted("dot"), tmp_path / "y")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("faiss", "hnswlib"))), reason="needs the packages of all examples"
)
def test_the_examples_in_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    from drm_triton.cli import main

    monkeypatch.chdir(tmp_path)
    users, items = generate(Shape(users=50, items=200, interactions=2000), 0)
    names = ["ann" if u == 0 else f"user {u}" for u in users]
    model = DRM(factors=8, epochs=2).fit(Dataset.from_frame(pl.DataFrame({"user": names, "item": items})))
    model.save("runs/ratings-final")
    everything = model.recommend(["ann"], 10, exclude_seen=False)["item"].to_list()
    unseen = model.recommend(["ann"], 10)["item"].to_list()
    assert unseen != everything
    blocks = re.findall(r"```(\w+)\n(.*?)```", (repository / "docs" / "exporting.md").read_text("utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python", "python", "python", "python"]
    for command in blocks[0][1].splitlines():
        monkeypatch.setattr(sys, "argv", command.split())
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
    for (_, code), expected in zip(blocks[1:], [unseen, everything, everything, everything], strict=True):
        found: dict[str, Any] = {}
        exec(code, found)
        assert list(found["best"]) == expected
