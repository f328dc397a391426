"""Public splits: the format of LightGCN, the adjacency matrix of Gowalla, and the recognition by size."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from drm_triton.data.leaderboards import PUBLIC_SPLITS, PublicSplit
from drm_triton.data.prepare.parts import PartsOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import SOURCES, Source
from drm_triton.data.prepare.sources.public_splits import source_of
from drm_triton.errors import InputError

M, N = 30, 20
SMALL = PublicSplit(M, N, train=240, test=59, results=())


def interactions() -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return train and test items of 30 users: eight and two, but user 7 has one test item."""
    rng = np.random.default_rng(0)
    chosen = {user: [int(item) for item in rng.permutation(N)[:10]] for user in range(M)}
    test = {user: items[8:] for user, items in chosen.items()}
    test[7] = test[7][:1]
    return {user: items[:8] for user, items in chosen.items()}, test


def lines(lists: dict[int, list[int]], end: str = "\n") -> str:
    return "".join(" ".join(map(str, [user, *items])) + end for user, items in lists.items())


def adjacency(train: dict[int, list[int]]) -> scipy.sparse.csr_matrix:
    """Return the normalised adjacency matrix, as LightGCN stores it."""
    R = scipy.sparse.dok_matrix((M, N), dtype=np.float32)
    for user, items in train.items():
        for item in items:
            R[user, item] = 1
    A = scipy.sparse.bmat([[None, R], [R.T, None]], format="csr")
    scale = scipy.sparse.diags(1 / np.sqrt(np.maximum(np.asarray(A.sum(1)).ravel(), 1)))
    return (scale @ A @ scale).tocsr()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write train.txt and test.txt as LightGCN has them: lines may end with a blank."""
    train, test = interactions()
    place = tmp_path / "raw"
    place.mkdir()
    (place / "train.txt").write_text(lines(train))
    (place / "test.txt").write_text(lines(test, " \n"))
    return place


def small(name: str) -> Source:
    """Return the source of a public split, as if the split were as small as the files here."""
    return source_of(name, SMALL)


@pytest.mark.parametrize("name", PUBLIC_SPLITS)
def test_each_public_split_is_read_and_recognised(name: str, folder: Path, tmp_path: Path) -> None:
    assert SOURCES[name].public_split == PUBLIC_SPLITS[name]
    data = prepare(small(name), [folder], tmp_path / "out")
    train, test = interactions()
    assert [data.train.row(user).tolist() for user in range(M)] == [sorted(train[user]) for user in range(M)]
    assert [data.test.row(user).tolist() for user in range(M)] == [sorted(test[user]) for user in range(M)]
    assert data.meta["public_split"] == name
    held_out = prepare(small(name), [folder], tmp_path / "valid", options=PartsOptions(0.1))
    assert (held_out.train.nnz, held_out.valid.nnz) == (216, 24)
    assert held_out.meta["public_split"] == name  # test is the same


def test_other_files_are_not_taken_for_the_public_split(folder: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"these files have 30 users, .* public split yelp2018 has 31,668 users"):
        data = prepare(SOURCES["yelp2018"], [folder], tmp_path / "out")
    assert "public_split" not in data.meta
    assert data.test.nnz == 59


def test_carriage_returns_users_without_items_and_zip_files(folder: Path, tmp_path: Path) -> None:
    train, test = interactions()
    test[3] = []
    with zipfile.ZipFile(tmp_path / "split.zip", "w") as archive:
        archive.writestr("split/train.txt", lines(train, "\r\n"))
        archive.writestr("split/test.txt", lines(test, "\r\n"))
    source = source_of("amazon-book", PublicSplit(M, N, 240, 57, ()))
    data = prepare(source, [tmp_path / "split.zip"], tmp_path / "out")
    assert data.test.row(3).tolist() == []
    assert data.meta["public_split"] == "amazon-book"


def with_diagonal(A: scipy.sparse.csr_matrix) -> Any:
    """Return the matrix with self-loops, as NGCF normalises it."""
    return (A + scipy.sparse.identity(M + N)).tocsr()


def with_zero(A: scipy.sparse.csr_matrix) -> Any:
    """Return the matrix with a stored zero, which is no interaction."""
    A = A.tocoo()
    free = next((u, M + i) for u in range(M) for i in range(N) if i not in interactions()[0][u])
    both = [np.append(A.row, [free[0], free[1]]), np.append(A.col, [free[1], free[0]])]
    return scipy.sparse.coo_matrix((np.append(A.data, [0, 0]), both), shape=A.shape)


@pytest.mark.parametrize("change", [lambda A: A, lambda A: A.tocsc(), with_diagonal, with_zero])
def test_gowalla_from_the_adjacency_matrix(change: Callable[[Any], Any], folder: Path, tmp_path: Path) -> None:
    from_lists = prepare(small("gowalla"), [folder], tmp_path / "lists")
    (folder / "train.txt").unlink()
    scipy.sparse.save_npz(folder / "s_adj_mat.npz", change(adjacency(interactions()[0])))
    data = prepare(small("gowalla"), [folder], tmp_path / "matrix")
    assert data.checksum == from_lists.checksum
    assert data.meta["public_split"] == "gowalla"
    assert [file["file"] for file in data.meta["files"]] == ["s_adj_mat.npz", "test.txt"]


def cut_short(A: scipy.sparse.csr_matrix) -> bytes:
    buffer = io.BytesIO()
    scipy.sparse.save_npz(buffer, A)
    return buffer.getvalue()[:-200]


def pickled(A: scipy.sparse.csr_matrix) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, format=np.array(b"csr"), shape=A.shape, data=np.array([{}], dtype=object), indices=A.indices)
    return buffer.getvalue()


def out_of_range(A: scipy.sparse.csr_matrix) -> bytes:
    buffer = io.BytesIO()
    indices = np.where(np.arange(A.nnz) == 5, 10**6, A.indices)
    np.savez(buffer, format=np.array(b"csr"), shape=A.shape, data=A.data, indices=indices, indptr=A.indptr)
    return buffer.getvalue()


def saved(matrix: Any) -> bytes:
    buffer = io.BytesIO()
    scipy.sparse.save_npz(buffer, matrix.tocsr())
    return buffer.getvalue()


def users_joined(A: scipy.sparse.csr_matrix) -> bytes:
    A = A.tolil()
    A[0, 1] = 1
    return saved(A)


def one_sided(A: scipy.sparse.csr_matrix) -> bytes:
    return saved(scipy.sparse.triu(A))


def not_finite(A: scipy.sparse.csr_matrix) -> bytes:
    A.data[3] = np.nan
    return saved(A)


def other_arrays(A: scipy.sparse.csr_matrix) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=A.data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda A: b"not a zip file", "cannot be read as a SciPy sparse matrix"),
        (cut_short, "cannot be read as a SciPy sparse matrix"),
        (pickled, "cannot be read as a SciPy sparse matrix .*allow_pickle"),
        (other_arrays, "cannot be read as a SciPy sparse matrix"),
        (out_of_range, "cannot be read as a SciPy sparse matrix"),
        (lambda A: saved(A[:-1, :-1]), r"its shape is \(49, 49\), not \(50, 50\)"),
        (lambda A: saved(A[:M, M:]), r"its shape is \(30, 20\), not \(50, 50\)"),
        (users_joined, "joins users with users"),
        (one_sided, "not symmetric"),
        (not_finite, "not finite"),
    ],
)
def test_bad_adjacency_matrices(content: Callable[[Any], bytes], message: str, folder: Path, tmp_path: Path) -> None:
    (folder / "train.txt").unlink()
    (folder / "s_adj_mat.npz").write_bytes(content(adjacency(interactions()[0])))
    with pytest.raises(InputError, match=rf"not the adjacency matrix of 30 users and 20 items: .*{message}"):
        prepare(small("gowalla"), [folder], tmp_path / "out")


def test_ids_beside_an_adjacency_matrix_are_numbers(folder: Path, tmp_path: Path) -> None:
    (folder / "train.txt").unlink()
    scipy.sparse.save_npz(folder / "s_adj_mat.npz", adjacency(interactions()[0]))
    (folder / "test.txt").write_text("0 1\n1 x\n")
    with pytest.raises(InputError, match=r"line 2 of .*test.txt has no usable item id"):
        prepare(small("gowalla"), [folder], tmp_path / "out")


def test_the_folder_is_needed(folder: Path, tmp_path: Path) -> None:
    for raw in ([folder / "train.txt"], [folder / "train.txt", folder / "test.txt"]):
        with pytest.raises(InputError, match=r"give the folder that contains train.txt and test.txt as `raw`"):
            prepare(small("yelp2018"), raw, tmp_path / "out")
    (folder / "test.txt").unlink()
    with pytest.raises(InputError, match=r"contains no test.txt \(the test part\)"):
        prepare(small("yelp2018"), [folder], tmp_path / "out")
    (folder / "train.txt").unlink()
    with pytest.raises(InputError, match=r"contains no train.txt or s_adj_mat.npz \(the training part\)"):
        prepare(small("gowalla"), [folder], tmp_path / "out")
