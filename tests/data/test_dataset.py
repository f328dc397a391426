"""Data sets in memory and on disk."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.training.run import interactions_only
from tests.conftest import rot, run_python


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    frame = pl.DataFrame({"user": ["b", "a", "c"] * 5, "item": list(range(15))})
    Dataset.from_frame(frame).save(tmp_path / "data")
    return tmp_path / "data"


def test_from_csr_of_scipy_and_of_pairs_agree() -> None:
    train = scipy.sparse.csr_matrix([[0, 1, 1], [1, 0, 0]])
    test = scipy.sparse.coo_matrix([[1, 0, 0], [0, 0, 5]])
    data = Dataset.from_csr(train, test=test, user_ids=["u", "v"])
    same = Dataset.from_csr(([0, 2, 3], [2, 1, 0]), test=([0, 1, 2], [0, 2]), user_ids=["u", "v"])
    assert data.checksum == same.checksum
    assert data.valid.nnz == 0
    assert data.test.row(1).tolist() == [2]
    assert data.item_ids.to_list() == [0, 1, 2]


OVERFLOWING = [0, 2**62, -(2**63), -(2**62), 0, 1]  # row pointers whose differences in int64 are not negative


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": [1, 2, 3]}, "pair"),
        ({"train": ([0, 2], [0])}, "row pointers"),
        ({"train": (OVERFLOWING, [0])}, "row pointers"),
        ({"train": ([0, 1], [5]), "n_items": 3}, "item 5"),
        ({"train": ([0, 1], [2**31 - 1])}, "at most 2147483647"),
        ({"train": ([0, 1], [2**31 + 5])}, "at most 2147483647"),
        ({"train": ([0, 1], [0.5])}, "whole numbers"),
        ({"train": ([0, 1], np.array([2**63], dtype=np.uint64))}, "whole numbers"),
        ({"train": ([0, 1], [-1]), "n_items": 3}, "item -1"),
        ({"train": ([0, 1], [0]), "test": ([0, 1], [0])}, "share"),
        ({"train": ([0, 1], [0]), "test": ([0, 1, 1], [0])}, "shape"),
        ({"train": ([0, 1], [0]), "user_ids": ["a", "b"]}, "user_ids"),
        ({"train": ([0, 2], [0, 1]), "item_ids": ["a", "a"]}, "item_ids"),
        ({"train": ([0, 2], [0, 1]), "item_ids": [1.5, 1.25]}, "`item_ids` must be whole numbers or text"),
        ({"train": ([0, 2], [0, 1]), "item_ids": [[1], [2]]}, "`item_ids` must be whole numbers or text"),
        ({"train": ([0, 2], [0, 1]), "item_ids": ["a", 1]}, "`item_ids` must be whole numbers or text"),
    ],
)
def test_from_csr_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset.from_csr(**arguments)


def test_from_csr_brings_ids_to_whole_numbers_or_text() -> None:
    def checksum(ids: Any) -> str:
        return Dataset.from_csr(([0, 2], [0, 1]), item_ids=ids).checksum

    assert checksum(np.array([1.0, 2.0])) == checksum([1, 2]) == checksum(np.array([1, 2], dtype=np.uint64))
    large = np.array([2**64 - 1, 2], dtype=np.uint64)
    assert checksum(large) == checksum([str(2**64 - 1), "2"])
    assert checksum(large) != checksum([-1, 2])


def test_the_values_of_scipy_matrices_are_weights_only_if_asked_for(tmp_path: Path) -> None:
    train = scipy.sparse.csr_matrix([[0, 1.5, 2], [3, 0, 0]])
    test = scipy.sparse.coo_matrix([[4, 0, 0], [0, 0, 5]])
    plain = Dataset.from_csr(train, test=test)
    assert not plain.weighted
    data = Dataset.from_csr(train, test=test, weighted=True)
    assert data.weighted
    assert data.checksum != plain.checksum
    data.save(tmp_path / "d")
    again = Dataset.load(tmp_path / "d")
    stored = {name: getattr(again, name).weights for name in ("train", "valid", "test")}
    assert {name: weights.tolist() for name, weights in stored.items()} == {
        "train": [1.5, 2, 3],
        "valid": [],
        "test": [4, 5],
    }
    assert isinstance(stored["train"], np.memmap)
    assert (again.checksum, again.meta["weights"]) == (data.checksum, {"least": 1.5, "most": 5.0, "mean": 3.1})
    plain.save(tmp_path / "d", overwrite=True)
    assert not Dataset.load(tmp_path / "d").weighted
    assert sorted(path.suffixes[0] for path in (tmp_path / "d").glob("train*")) == [".indices", ".indptr"]


def test_weights_of_repeated_columns_are_added() -> None:
    matrix = scipy.sparse.csr_matrix((np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2]), np.array([0, 3])), shape=(1, 3))
    train = Dataset.from_csr(matrix, weighted=True).train
    assert train.weights is not None
    assert (train.indices.tolist(), train.weights.tolist()) == ([0, 2], [2, 5])


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-30])
def test_values_that_are_no_weights(value: float) -> None:
    matrix = scipy.sparse.csr_matrix((np.array([1.0, value]), np.array([0, 2]), np.array([0, 1, 2])), shape=(2, 3))
    with pytest.raises(
        InputError, match=r"`train` has the value \S+ in row 1, column 2; a weight is a number from 1e-20"
    ):
        Dataset.from_csr(matrix, weighted=True)
    assert Dataset.from_csr(matrix).train.nnz == 2


def test_weights_need_values_in_every_part() -> None:
    with pytest.raises(InputError, match="`weighted` needs scipy sparse matrices, whose values it takes; `train` has"):
        Dataset.from_csr(([0, 1], [0]), weighted=True)
    weighted, plain = (
        Dataset.from_csr(scipy.sparse.identity(2), weighted=weighted).train for weighted in (True, False)
    )
    with pytest.raises(InputError, match="all of `train`, `valid` and `test` have weights, or none"):
        Dataset(weighted, plain, plain)


def test_a_model_keeps_no_weights() -> None:
    data = Dataset.from_csr(scipy.sparse.identity(4), weighted=True)
    assert not interactions_only(data, data.train).weighted


def test_load_maps_memory(stored: Path) -> None:
    data = Dataset.load(stored)
    assert isinstance(data.train.indices, np.memmap)
    assert not data.train.indices.flags.writeable


def test_empty_splits_are_stored(tmp_path: Path) -> None:
    Dataset.from_csr(([0, 1], [0])).save(tmp_path / "d")
    assert Dataset.load(tmp_path / "d").test.nnz == 0


def test_encode_names_unknown_ids(stored: Path) -> None:
    data = Dataset.load(stored)
    assert data.encode_users(["c", "a"]).tolist() == [2, 0]
    assert data.encode_items(["14", 3]).tolist() == [14, 3]
    assert data.encode_users([]).tolist() == []
    with pytest.raises(InputError, match="unknown user ids: 'x', 'y'"):
        data.encode_users(["a", "x", "y", "x"])
    with pytest.raises(InputError, match="and 2 more"):
        data.encode_items([f"no{k}" for k in range(7)])


def test_save_replaces_only_with_overwrite(stored: Path) -> None:
    other = Dataset.from_csr(([0, 1], [0]))
    with pytest.raises(InputError, match="already exists"):
        other.save(stored)
    assert Dataset.load(stored).n_users == 3
    other.save(stored, overwrite=True)
    assert Dataset.load(stored).n_users == 1
    assert [p.name for p in stored.parent.iterdir()] == ["data"]


def test_overwrite_spares_other_directories(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(InputError, match="was not made by this program"):
        Dataset.from_csr(([0, 1], [0])).save(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.tex").exists()


def test_a_link_to_a_data_set_stays_a_link(stored: Path) -> None:
    link = stored.with_name("link")
    link.symlink_to(stored.name)
    other = Dataset.from_csr(([0, 1], [0]))
    with pytest.raises(InputError, match="already exists"):
        other.save(link)
    other.save(link, overwrite=True)
    assert link.is_symlink()
    assert Dataset.load(stored).n_users == 1
    assert sorted(p.name for p in stored.parent.iterdir()) == ["data", "link"]


def test_a_long_name_is_no_trouble(tmp_path: Path) -> None:
    Dataset.from_csr(([0, 1], [0])).save(tmp_path / ("x" * 255))
    with pytest.raises(InputError, match="too long"):
        Dataset.from_csr(([0, 1], [0])).save(tmp_path / ("x" * 256))


def damage_version(path: Path) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"version": 99}))


def damage_sizes(path: Path) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"train": meta["train"] + 1}))


def cut_array(path: Path) -> None:
    file = path / "train.indices.npy"
    file.write_bytes(file.read_bytes()[:-4])


def wrong_pointers(path: Path) -> None:
    indptr = np.load(path / "train.indptr.npy")
    indptr[-1] += 1
    np.save(path / "train.indptr.npy", indptr)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_version, "version 99"),
        (damage_sizes, "promises"),
        (cut_array, "train.indices.npy"),
        (wrong_pointers, "row pointers of train"),
        (lambda path: (path / "test.indptr.npy").unlink(), "test.indptr.npy"),
        (lambda path: (path / "meta.json").write_text("{"), "meta.json"),
        (lambda path: (path / "meta.json").write_text("[]"), "meta.json"),
        (lambda path: (path / "meta.json").unlink(), "no meta.json"),
        (lambda path: pl.DataFrame({"id": [1]}).write_parquet(path / "users.parquet"), "1 rows, not 3"),
        (lambda path: (path / "items.parquet").write_bytes(b"PAR1"), "items.parquet"),
        (lambda path: pl.DataFrame({"name": [1, 2, 3]}).write_parquet(path / "users.parquet"), "users.parquet"),
    ],
)
def test_load_refuses_a_damaged_store(stored: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(stored)
    with pytest.raises(InputError, match=message):
        Dataset.load(stored)


def change_array(path: Path, name: str, position: int, value: float) -> None:
    array = np.load(path / f"{name}.npy")
    array[position] = value
    np.save(path / f"{name}.npy", array)


@pytest.mark.parametrize(
    ("name", "position", "value", "message"),
    [
        ("train.indptr", 1, -5, "row pointers of train"),
        ("train.indptr", 1, 10**12, "row pointers of train"),
        ("valid.indptr", 0, 1, "row pointers of valid"),
        ("train.indices", 0, 10**9, r"train has items outside 0\.\.14"),
        ("train.indices", 0, -1, "train has items outside"),
        ("train.indices", 1, 0, "do not ascend|checksum"),
    ],
)
def test_load_refuses_what_would_crash_compiled_code(
    stored: Path, name: str, position: int, value: int, message: str
) -> None:
    Dataset.load(stored)  # a stamp of the whole store does not cover the damaged one
    change_array(stored, name, position, value)
    with pytest.raises(InputError, match=message):
        Dataset.load(stored)


def test_load_refuses_row_pointers_whose_differences_overflow(tmp_path: Path) -> None:
    Dataset.from_csr(([0, 1, 1, 1, 1, 1], [0])).save(tmp_path / "x")
    np.save(tmp_path / "x" / "train.indptr.npy", np.array(OVERFLOWING))
    with pytest.raises(InputError, match="row pointers of train"):
        Dataset.load(tmp_path / "x")


def test_load_refuses_a_store_whose_content_changed(stored: Path) -> None:
    Dataset.load(stored)
    pl.DataFrame({"id": ["a", "b", "x"]}).write_parquet(stored / "users.parquet")
    with pytest.raises(InputError, match=r"does not have the checksum .* restore it from a copy"):
        Dataset.load(stored)
    pl.DataFrame({"id": ["a", "a", "c"]}).write_parquet(stored / "users.parquet")
    with pytest.raises(InputError, match="user ids are not all different"):
        Dataset.load(stored)


def test_parts_that_share_interactions_and_bad_weights_are_refused(tmp_path: Path) -> None:
    """A store with a checksum that fits, as another program may write it."""
    one = CSR(np.array([0, 2]), np.array([0, 2], dtype=np.int32), (1, 3))
    with pytest.raises(InputError, match="more than one of train, valid, test"):
        Dataset(one, one, CSR.empty((1, 3))).verify()
    for weights in ([1.0, np.nan], [1.0, 0.0], [np.inf, 1.0]):
        bad = CSR(one.indptr, one.indices, one.shape, np.array(weights, dtype=np.float32))
        empty = CSR.empty((1, 3), weighted=True)
        with pytest.raises(InputError, match="train has weights that are not positive and finite"):
            Dataset(bad, empty, empty).verify()
    Dataset(one, CSR.empty((1, 3)), CSR.empty((1, 3))).verify()


def test_blocks_are_verified_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drm_triton.data.verify.BLOCK", 3)
    rng = np.random.default_rng(0)
    dense = rng.random((40, 20)) < 0.3
    parts = [scipy.sparse.csr_matrix(dense & (np.arange(40) % 2 == part)[:, None]) for part in (0, 1)]
    data = Dataset.from_csr(parts[0], parts[1])
    data.verify()
    both = data.train.union(data.valid)
    Dataset(both, CSR.empty(both.shape), CSR.empty(both.shape)).verify()
    for row in np.flatnonzero(both.degrees() > 1):
        indices = both.indices.copy()
        indices[both.indptr[row] + 1] = indices[both.indptr[row]]
        with pytest.raises(InputError, match="do not ascend"):
            Dataset(CSR(both.indptr, indices, both.shape), data.valid, data.test).verify()
    with pytest.raises(InputError, match="more than one"):
        Dataset(both, data.valid, data.test).verify()


def test_a_verified_store_is_not_read_again(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    verify = Dataset.verify

    def counted(self: Dataset) -> None:
        assert self.path is not None
        calls.append(self.path)
        verify(self)

    monkeypatch.setattr(Dataset, "verify", counted)
    for expected in (1, 1):
        Dataset.load(stored)
        assert len(calls) == expected
    link = stored.with_name("link")
    link.symlink_to(stored)
    Dataset.load(link)
    assert len(calls) == 1
    file = stored / "test.indices.npy"
    status = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # the time of the change of the inode still tells
    Dataset.load(stored)
    assert len(calls) == 2


@pytest.mark.parametrize("mapped", [True, False])
def test_verify_finds_what_the_stamp_cannot_see(stored: Path, mapped: bool) -> None:
    want = Dataset.load(stored, mapped, verify=True).train.indices.copy()
    rot(stored)
    assert not np.array_equal(Dataset.load(stored, mapped).train.indices, want)
    says = r"is damaged: its content \(train\.\*, .*\) does not have the checksum .*; restore it from a copy"
    with pytest.raises(InputError, match=says):
        Dataset.load(stored, mapped, verify=True)
    with pytest.raises(InputError, match=says):  # what is known to be damaged has no stamp
        Dataset.load(stored, mapped)


def test_verify_leaves_a_stamp(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dataset.load(stored, verify=True)
    monkeypatch.setattr(Dataset, "verify", lambda self: pytest.fail("the stamp is not used"))
    Dataset.load(stored)


@pytest.mark.parametrize("missing", ["the content", "the titles", "dropped.*", "dropped_elsewhere.*"])
def test_verify_refuses_what_has_no_checksum(stored: Path, missing: str) -> None:
    data = Dataset.load(stored)
    data = Dataset(data.train, data.valid, data.test, data.users, data.items.with_columns(title=pl.lit("x")))
    pairs = pl.DataFrame({"user": ["a", "z"], "item": [0, 1]})
    data.with_dropped(pairs).save(stored, overwrite=True)
    Dataset.load(stored, verify=True)
    meta = json.loads((stored / "meta.json").read_text())
    if missing.endswith(".*"):
        del meta[missing.removesuffix(".*")]["checksum"]
    else:
        del meta[{"the content": "checksum", "the titles": "titles"}[missing]]
    (stored / "meta.json").write_text(json.dumps(meta))
    again = Dataset.load(stored)
    says = rf"cannot be verified: meta\.json records no checksum of {re.escape(missing)}; leave out `verify`, or load"
    with pytest.raises(InputError, match=says):
        Dataset.load(stored, verify=True)
    again.save(stored, overwrite=True)
    Dataset.load(stored, verify=True)


def test_without_a_private_cache_a_store_is_verified_each_time(
    stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)  # others could leave stamps of damaged stores here
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[Dataset] = []
    monkeypatch.setattr(Dataset, "verify", lambda self: calls.append(self))
    for _ in range(2):
        Dataset.load(stored)
    assert len(calls) == 2


def test_few_stamps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("drm_triton.data.verify.MOST_STAMPS", 4)
    for number in range(9):
        Dataset.from_csr(([0, 1], [0])).save(tmp_path / str(number))
        Dataset.load(tmp_path / str(number))
    assert 1 <= len(list((tmp_path / "cache" / "drm-triton" / "verified").iterdir())) <= 4


@pytest.mark.parametrize(
    "change",
    [{"users": 3.0}, {"users": True}, {"items": -1}, {"train": "9"}, {"checksum": 5}, {"steps": {}}, {"weights": 1}],
)
def test_wrong_types_in_meta_json(stored: Path, change: dict[str, Any]) -> None:
    meta = json.loads((stored / "meta.json").read_text())
    (stored / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(InputError, match=r"meta\.json"):
        Dataset.load(stored)


def test_a_deeply_nested_meta_json(stored: Path) -> None:
    (stored / "meta.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"meta\.json"):
        Dataset.load(stored)


def test_load_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no data set at"):
        Dataset.load(tmp_path / "nothing")


def test_meta_survives_a_second_save(stored: Path, tmp_path: Path) -> None:
    data = Dataset.load(stored)
    data.save(tmp_path / "copy")
    again = Dataset.load(tmp_path / "copy")
    assert again.meta == data.meta
    assert again.meta["steps"]


def test_loading_a_data_set_does_not_import_its_preparation(stored: Path) -> None:
    script = (
        "import sys; from drm_triton import Dataset; from drm_triton.data import find_dataset; "
        f"Dataset.load(find_dataset({str(stored)!r})).encode_users(['a']); "
        "print([name for name in sys.modules if name.startswith('drm_triton.data.prepare')])"
    )
    assert run_python("-c", script).stdout == "[]\n"
