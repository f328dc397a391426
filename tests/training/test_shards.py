"""Checkpoints in row shards: the same model as in one file, complete at any moment, and nothing damaged is accepted."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drm_triton import DRM, Dataset, atomic
from drm_triton.errors import DrmError, InputError
from drm_triton.serving.loading import load_in_memory
from drm_triton.training import shards
from drm_triton.training.checkpoint import (
    FILE,
    read_metadata,
    read_rows,
    read_tensors,
    remove_leftovers,
    write_manifest,
    write_shard,
    write_tensors,
)
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("no_curves")

METADATA = {"model": "drm", "config": {"factors": 3}, "training": {"epoch": 2}}


def example(seed: int = 0, users: int = 11, items: int = 7) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    sizes = {"user_factors": (users, 3), "item_factors": (items, 3), "user_state": (users, 3), "item_bias": (items,)}
    return {name: torch.randn(size, generator=rng) for name, size in sizes.items()}


def bounds(total: int, world_size: int) -> list[int]:
    """Rows of unequal numbers: ranks have up to ceil(total / world_size) rows, and the last may have none."""
    each = -(-total // world_size)
    return [min(rank * each, total) for rank in range(world_size + 1)]


def write_shards(folder: Path, tensors: dict[str, Tensor], world_size: int, tag: str = "e1-p0") -> list[dict[str, Any]]:
    described = []
    for rank in range(world_size):
        cuts = {name: bounds(len(tensor), world_size)[rank : rank + 2] for name, tensor in tensors.items()}
        own = {name: tensors[name][start:stop] for name, (start, stop) in cuts.items()}
        first = {name: start for name, (start, _) in cuts.items()}
        totals = {name: len(tensor) for name, tensor in tensors.items()}
        described.append(write_shard(folder, tag, rank, world_size, own, first, totals))
    return described


def sharded(folder: Path, tensors: dict[str, Tensor], world_size: int = 3, tag: str = "e1-p0") -> Path:
    folder.mkdir(exist_ok=True)
    write_manifest(folder / FILE, write_shards(folder, tensors, world_size, tag), METADATA)
    return folder / FILE


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    equal = (torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in found)
    return found.keys() == expected.keys() and all(equal)


def read_header(path: Path) -> Any:
    """Return the header of a file, which contains the checksum of all."""
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# -- what is written is what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 9])
def test_shards_are_read_as_the_single_file_is(tmp_path: Path, world_size: int) -> None:
    """With 9 processes, some have no row of a tensor: 7 items are 1 each, 11 users 2 each."""
    tensors = example()
    path = sharded(tmp_path / "shards", tensors, world_size)
    (tmp_path / "whole").mkdir()
    write_tensors(tmp_path / "whole" / FILE, tensors, METADATA)
    assert len(names(path.parent)) == 1 + world_size
    found, metadata = read_tensors(path)
    assert same(found, tensors)
    assert metadata == read_tensors(tmp_path / "whole" / FILE)[1] == read_metadata(path)
    write_tensors(path, found, {name: metadata[name] for name in METADATA})  # as one process that resumes
    assert read_header(path) == read_header(tmp_path / "whole" / FILE)
    assert names(path.parent) == [FILE]


def test_types(tmp_path: Path) -> None:
    tensors = {
        "user_factors": torch.randn(5, 2).bfloat16(),
        "item_factors": torch.randn(5, 2)[:, :1],
        "long": torch.arange(5),
        "double": torch.randn(5, 1, 2, dtype=torch.float64),
        "bool": torch.arange(5) > 2,
        "none": torch.empty(0, 4),
        "narrow": torch.empty(5, 0),
    }
    path = sharded(tmp_path / "shards", tensors, 2)
    found, _ = read_tensors(path)
    assert same(found, {**tensors, "user_factors": tensors["user_factors"].float()})
    rows, _ = read_rows(path, {"double": slice(2, 4), "bool": slice(1, 5), "none": slice(0, 3), "narrow": slice(1, 3)})
    assert same(rows, {"double": tensors["double"][2:4], "bool": tensors["bool"][1:], "none": tensors["none"],
                       "narrow": tensors["narrow"][1:3]})  # fmt: skip


@pytest.mark.parametrize("world_size", [0, 1, 3, 5])
def test_rows_are_those_of_the_tensors(tmp_path: Path, world_size: int) -> None:
    """World size 0 is the single file."""
    tensors, path = example(), tmp_path / FILE
    if world_size:
        sharded(tmp_path, tensors, world_size)
    else:
        write_tensors(path, tensors, METADATA)
    for start in range(12):
        for stop in range(start, 13):
            rows = {name: slice(start, stop) for name in ("user_factors", "item_bias")}
            found, metadata = read_rows(path, rows)
            assert same(found, {name: tensors[name][start:stop] for name in rows})
    assert metadata == read_metadata(path)
    assert same(read_rows(path, {"user_state": slice(None)})[0], {"user_state": tensors["user_state"]})
    assert read_rows(path, {})[0] == {}
    with pytest.raises(InputError, match="the model file lacks item_state"):
        read_rows(path, {"item_state": slice(0, 1)})
    with pytest.raises(ValueError, match="consecutive"):
        read_rows(path, {"user_state": slice(0, 9, 2)})


def test_a_tensor_may_be_in_one_shard_only(tmp_path: Path) -> None:
    """As a small table that every process has, and the first of them writes."""
    tensors = {"user_factors": torch.randn(4, 2), "item_factors": torch.randn(3, 2)}
    own = [{**tensors, "user_factors": tensors["user_factors"][:2]}, {"user_factors": tensors["user_factors"][2:]}]
    totals, first = {"user_factors": 4, "item_factors": 3}, {"item_factors": 0}
    described = [write_shard(tmp_path, "x", r, 2, own[r], {**first, "user_factors": 2 * r}, totals) for r in range(2)]
    write_manifest(tmp_path / FILE, json.loads(json.dumps(described)), METADATA)
    assert same(read_tensors(tmp_path / FILE)[0], tensors)


MEMORY = """
import resource, sys
from pathlib import Path
from drm_triton.training.checkpoint import read_rows

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
read_rows(Path(sys.argv[1]), {"user_factors": slice(0, 0)})
before = peak()
read_rows(Path(sys.argv[1]), {"user_factors": slice(30_000, 30_010)})
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss")
@pytest.mark.parametrize("world_size", [0, 2])
def test_rows_are_read_without_the_tensors(tmp_path: Path, world_size: int) -> None:
    """64 MB in one file or in two; a file is verified in full to read ten rows of it."""
    tensors = {"user_factors": torch.zeros(250_000, 64), "item_factors": torch.zeros(1, 64)}
    if world_size:
        sharded(tmp_path, tensors, world_size)
    else:
        write_tensors(tmp_path / FILE, tensors, METADATA)
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / FILE], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) < 12 << 20, done


# -- the checkpoint before it ------------------------------------------------------------------------------------------


def test_the_next_checkpoint_replaces_shards_of_any_number(tmp_path: Path) -> None:
    for number, world_size in enumerate((3, 2, 5)):
        tensors = example(number)
        path = sharded(tmp_path, tensors, world_size, f"e{number}-p0")
        assert same(read_tensors(path)[0], tensors)
        assert names(tmp_path) == [
            *sorted(shards.file_name(f"e{number}-p0", r, world_size) for r in range(world_size)),
            FILE,
        ]


def no_links(*_: object) -> None:
    raise OSError(1, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_two_checkpoints_at_once(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    last, best = tmp_path / "last", tmp_path / "best"
    for folder in (last, best):
        folder.mkdir()
    for epoch, improved in ((1, True), (2, True), (3, False)):
        described = write_shards(last, example(epoch), 2, f"e{epoch}-p0")
        write_manifest(last / FILE, described, METADATA, best / FILE if improved else None)
    assert same(read_tensors(last / FILE)[0], example(3))
    assert same(read_tensors(best / FILE)[0], example(2))
    assert names(best) == [*(shards.file_name("e2-p0", rank, 2) for rank in range(2)), FILE]
    for folder in (last, best):  # others may read it
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {(last / FILE).stat().st_mode & 0o777}
    write_tensors(last / FILE, example(4), METADATA, best / FILE)
    assert names(last) == names(best) == [FILE]
    assert same(read_tensors(best / FILE)[0], example(4))


@contextmanager
def moments(run: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Copy a folder before every change of files: a kill at that moment would leave the same."""
    found: list[Path] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            copied = Path(shutil.copytree(run, copies / f"{len(found)}", copy_function=shutil.copyfile))
            found.append(copied)
            return function(*args, **keywords)

        return call

    with monkeypatch.context() as patched:
        for name in ("fsync", "rename", "replace", "unlink", "link"):
            patched.setattr(os, name, counted(getattr(os, name)))
        yield found
    found.append(run)


@pytest.mark.parametrize("single", [False, True], ids=["sharded", "on one process"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool, single: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    run, old, new = tmp_path / "run", example(1), example(2)
    for folder in ("last", "best"):
        (run / folder).mkdir(parents=True)
    described = write_shards(run / "last", old, 3, "e1-p0")
    write_manifest(run / "last" / FILE, described, METADATA, run / "best" / FILE)
    with moments(run, tmp_path, monkeypatch) as found:
        if single:
            write_tensors(run / "last" / FILE, new, METADATA, run / "best" / FILE)
        else:
            described = write_shards(run / "last", new, 2, "e2-p0")
            write_manifest(run / "last" / FILE, described, METADATA, run / "best" / FILE)
    assert len(found) > (8 if single else 20)
    seen = set()
    for left in found:
        here = []
        for folder in ("last", "best"):
            tensors, _ = read_tensors(left / folder / FILE)
            here.append("new" if same(tensors, new) else "old")
            assert same(tensors, new if here[-1] == "new" else old)
            remove_leftovers(left / folder / FILE)
            named = 0 if single and here[-1] == "new" else 2 if here[-1] == "new" else 3
            assert len(names(left / folder)) == 1 + named, names(left / folder)
        seen.add(tuple(here))
        newest = write_shards(left / "last", example(3), 4, "e3-p0")
        write_manifest(left / "last" / FILE, newest, METADATA, left / "best" / FILE)
        assert names(left / "last") == names(left / "best")
        assert len(names(left / "last")) == 5
    assert seen == {("old", "old"), ("old", "new"), ("new", "new")}


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    path = sharded(tmp_path, example())
    write_shards(tmp_path, example(1), 2, "e2-p0")  # killed before the manifest
    others = ["model-00001-of-00002.safetensors", "notes.txt", ".hidden"]
    for name in (*others, ".model-e2-p0-1-of-2.safetensors.0123abcd.partial", ".model.safetensors.0123abcd.partial"):
        (tmp_path / name).touch()
    remove_leftovers(path)
    own = [shards.file_name("e1-p0", rank, 3) for rank in range(3)]
    assert names(tmp_path) == sorted([*others, *own, FILE])
    content = path.read_bytes()
    path.write_bytes(content[:-9])  # a damaged manifest: its shards stay
    remove_leftovers(path)
    assert len(names(tmp_path)) == 7
    path.unlink()  # killed before the first checkpoint
    remove_leftovers(path)
    assert names(tmp_path) == sorted(others)
    remove_leftovers(tmp_path / "missing" / FILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop(0), "row 0 of user_factors is in none of its shards"),
        (lambda parts: parts.pop(1), "row 4 of user_factors is in none of its shards"),
        (lambda parts: parts.pop(2), "its shards have 8 rows of user_factors, not 11"),
        (lambda parts: parts.append(parts[1]), "it names a shard twice"),
        (lambda parts: parts[1]["tensors"]["item_bias"].update(first=2), "row 2 of item_bias is in more than one"),
        (lambda parts: parts[1]["tensors"]["item_bias"].update(first=4), "row 3 of item_bias is in none"),
        (lambda parts: parts[2]["tensors"]["item_bias"].update(total=8), "disagree about the shape or the type of it"),
        (lambda parts: parts[2]["tensors"]["item_bias"].update(dtype="int64"), "disagree about the shape or the type"),
        (lambda parts: parts[2]["tensors"]["user_state"].update(shape=[4]), "disagree about the shape or the type"),
        (lambda parts: parts[2]["tensors"].pop("user_state"), "its shards have 8 rows of user_state, not 11"),
    ],
)
def test_a_manifest_needs_all_rows_once(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], object], message: str
) -> None:
    path = sharded(tmp_path, example(1))
    before = path.read_bytes()
    described = write_shards(tmp_path, example(2), 3, "e2-p0")
    change(described)
    with pytest.raises(DrmError, match=rf"cannot write .*{message}.*what was saved before is intact"):
        write_manifest(path, described, METADATA)
    assert path.read_bytes() == before
    assert same(read_tensors(path)[0], example(1))


def test_a_shard_that_is_not_there_is_noticed_before_the_commit(tmp_path: Path) -> None:
    """As on two machines that do not share a file system."""
    described = write_shards(tmp_path, example(), 2)
    (tmp_path / described[1]["file"]).unlink()
    with pytest.raises(DrmError, match=r"its shard model-e1-p0-1-of-2.safetensors is missing in .* the same directory"):
        write_manifest(tmp_path / FILE, described, METADATA)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(("tag", "rank"), [("../x", 0), ("", 0), ("a/b", 0), ("a b", 0), ("x", 2), ("x", -1)])
def test_names_of_shards(tmp_path: Path, tag: str, rank: int) -> None:
    with pytest.raises(ValueError, match="not the name of a shard"):
        write_shard(tmp_path, tag, rank, 2, {}, {}, {})
    assert names(tmp_path) == []


# -- damage ------------------------------------------------------------------------------------------------------------


def refused(path: Path, message: str) -> None:
    for read in (read_tensors, lambda path: read_rows(path, {"user_factors": slice(0, 11)})):
        with pytest.raises(InputError, match=message) as raised:
            read(path)
        assert "\n" not in str(raised.value)


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path, example())
    shard = tmp_path / shards.file_name("e1-p0", 1, 3)
    content = shard.read_bytes()
    shard.unlink()
    refused(path, "its shard model-e1-p0-1-of-3.safetensors is missing in .*; restore the directory from a copy")
    for size in (0, 5, 300, len(content) - 1):
        shard.write_bytes(content[:size])
        refused(path, r"is cut off|not a readable shard of a model \(")
    shard.write_bytes(content + b"x")
    refused(path, "not a readable shard of a model")
    body = len(content) - 4 * sum(tensor[:1].numel() for tensor in example().values())
    for position in (0, 9, content.index(b"user_factors"), content.index(b"total"), body, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 1
        shard.write_bytes(changed)
        refused(path, r"is damaged|not a readable shard|another model")
    shard.write_bytes(content)
    assert same(read_tensors(path)[0], example())


def test_foreign_shards_are_refused(tmp_path: Path) -> None:
    path, other = sharded(tmp_path / "a", example(0)), sharded(tmp_path / "b", example(1))
    larger = sharded(tmp_path / "c", example(2, users=14))
    shard = shards.file_name("e1-p0", 1, 3)
    shutil.copy(other.with_name(shard), path.with_name(shard))
    refused(path, f"{shard} is a shard of another checkpoint")
    shutil.copy(larger.with_name(shard), path.with_name(shard))
    refused(path, f"{shard} is a shard of another model: its tensors have other shapes")
    shutil.copy(path.with_name(shards.file_name("e1-p0", 0, 3)), path.with_name(shard))
    refused(path, f"{shard} is a shard of another (checkpoint|model)")


def test_rows_verify_only_the_shards_that_they_are_in(tmp_path: Path) -> None:
    path = sharded(tmp_path, example())
    shard = tmp_path / shards.file_name("e1-p0", 2, 3)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert same(read_rows(path, {"user_factors": slice(0, 8)})[0], {"user_factors": example()["user_factors"][:8]})
    for rows in ({"user_factors": slice(7, 9)}, {"item_bias": slice(6, 7)}):
        with pytest.raises(InputError, match="is damaged"):
            read_rows(path, rows)


def test_rows_of_a_single_file_are_verified(tmp_path: Path) -> None:
    write_tensors(tmp_path / FILE, example(), METADATA)
    content = bytearray((tmp_path / FILE).read_bytes())
    content[-1] ^= 1
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged: its content .*; restore"):
        read_rows(tmp_path / FILE, {"user_factors": slice(0, 1)})


def test_a_damaged_length_of_the_header_does_not_fill_the_memory(tmp_path: Path) -> None:
    write_tensors(tmp_path / FILE, example(), METADATA)
    with (tmp_path / FILE).open("r+b") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate((1 << 30) + 8)  # a sparse file
    refused(tmp_path / FILE, "its header is cut off, or it is not a safetensors file")


@pytest.mark.parametrize(
    "name", ["../a/model-e1-p0-0-of-3.safetensors", "/etc/passwd", "model.safetensors", "..", "", 7, None, ["x"]]
)
def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, name: object) -> None:
    path = sharded(tmp_path / "a", example())
    rewrite(path, lambda described: described[0].update(file=name))
    refused(path, r"not a readable model file \(.* is not the name of a shard\)")


@pytest.mark.parametrize(
    "change",
    [
        lambda described: described.clear(),
        lambda described: described.append(17),
        lambda described: described[0].pop("file"),
        lambda described: described[0].update(checksum=None),
        lambda described: described[0].update(checksum="0" * 64),
        lambda described: described[0].update(tensors=[]),
        lambda described: described[0]["tensors"].update(user_factors=[]),
        lambda described: described[0]["tensors"]["user_factors"].update(dtype="object"),
        lambda described: described[0]["tensors"]["user_factors"].update(dtype=[]),
        lambda described: described[0]["tensors"]["user_factors"].update(rows=-1),
        lambda described: described[0]["tensors"]["user_factors"].update(rows=4.0),
        lambda described: described[0]["tensors"]["user_factors"].update(rows=True),
        lambda described: described[0]["tensors"]["user_factors"].update(shape=3),
        lambda described: described[0]["tensors"]["user_factors"].update(shape=[1 << 70]),
        lambda described: described[2]["tensors"]["user_factors"].update(rows=1 << 40),
        lambda described: [x["tensors"]["user_factors"].update(shape=[1 << 40]) for x in described],
        lambda described: [x["tensors"]["user_factors"].update(shape=[1 << 47, 1 << 47]) for x in described],
        lambda described: [x["tensors"]["user_factors"].update(shape=[2]) for x in described],
        lambda described: [x["tensors"]["user_factors"].update(dtype="int32") for x in described],
        lambda described: [x["tensors"].pop("user_factors") for x in described],
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], object]
) -> None:
    path = sharded(tmp_path, example())
    rewrite(path, change)
    refused(path, r"not a readable model file|lacks .*user_factors|its shard .* is cut off|is a shard of another")


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the description of the shards in a manifest, and write it with the checksum that belongs to it."""
    header = read_header(path)
    about = json.loads(header["__metadata__"]["drm-triton"])
    change(about["shards"])
    metadata = {name: value for name, value in about.items() if name not in ("format", "version")}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "remove_unnamed", lambda *_: None)
        write_tensors(path, {}, metadata)


def test_a_manifest_has_a_checksum_and_no_tensors(tmp_path: Path) -> None:
    path = sharded(tmp_path, example())
    content, header = path.read_bytes(), read_header(path)
    del header["__metadata__"]["checksum"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    refused(path, "its metadata is damaged")
    path.write_bytes(content.replace(b"e1-p0", b"e2-p0"))
    refused(path, "is missing|is damaged")
    path.write_bytes(content)
    (tmp_path / "whole").mkdir()
    write_tensors(tmp_path / "whole" / FILE, example(), {**METADATA, "shards": []})
    refused(tmp_path / "whole" / FILE, "its metadata is damaged")


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read, commits = sharded(tmp_path, example(0)), shards.read, [1]

    def replaced_first(*arguments: Any) -> None:
        if commits[0] < most:
            sharded(tmp_path, example(commits[0]), 2, f"e{commits[0]}-p0x")
            commits[0] += 1
        read(*arguments)

    monkeypatch.setattr(shards, "read", replaced_first)
    most = 3
    assert same(read_tensors(path)[0], example(2))
    most = 100
    with pytest.raises(InputError, match="missing"):
        read_tensors(path)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> Dataset:
    rows = [(u, (u * 7 + n * n) % 31) for u in range(24) for n in range(9)]
    indptr = [0]
    indices: list[int] = []
    for u in range(24):
        items = sorted({i for v, i in rows if v == u})
        indices += items
        indptr.append(len(indices))
    return Dataset.from_csr((indptr, indices), n_items=31)


def spread(run: Path, world_size: int = 3) -> None:
    """Replace both checkpoints of a run by sharded ones, as a training on several processes would have left them."""
    for which in ("last", "best"):
        tensors, metadata = read_tensors(run / which / FILE)
        described = write_shards(run / which, tensors, world_size, f"e{metadata['training']['epoch']}-p0")
        write_manifest(run / which / FILE, described, {name: metadata[name] for name in METADATA})


def test_everything_works_on_a_sharded_run(data: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"factors": 4, "epochs": 4, "backend": "reference"}
    whole, run = tmp_path / "whole", tmp_path / "run"
    expected = DRM(**options).fit(data, run=whole)
    DRM(**options).fit(data, [lambda end: end.record["epoch"] == 2], run=run)
    spread(run)
    (run / "last" / shards.file_name("e3-p0", 0, 3)).touch()  # as a killed process leaves it
    DRM(**options).fit(data, run=run, resume=True)
    for which in ("last", "best"):
        assert same(read_tensors(run / which / FILE)[0], read_tensors(whole / which / FILE)[0])
    assert not list((run / "last").glob("model-*"))
    spread(run, 5)
    copied = Path(shutil.copytree(run / "best", tmp_path / "copied"))
    for place in (run, copied):
        loaded = DRM.load(place)
        assert loaded.recommend(k=3).equals(expected.recommend(k=3))
        assert load_in_memory(place).recommend(k=3).equals(expected.recommend(k=3))
    loaded.save(tmp_path / "saved")
    assert names(tmp_path / "saved") == ["data", FILE]
    assert same(DRM.load(tmp_path / "saved").tensors, loaded.tensors)
    loaded.save(copied, overwrite=True)
    assert names(copied) == ["data", FILE]


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sharded(tmp_path, example(0))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drm_triton.training.tensor_file.safetensors.torch.save_file", full)
    with pytest.raises(DrmError, match=r"no space left to write .*e2-p0-0-of-2"):
        write_shards(tmp_path, example(1), 2, "e2-p0")
    assert same(read_tensors(path)[0], example(0))
    assert not list(tmp_path.glob(f".*{atomic.PARTIAL}"))
