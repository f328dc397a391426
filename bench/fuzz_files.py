"""Files that `bench.fuzz` changes, and how each kind of them is read."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from drm_triton import DRM, Dataset
from drm_triton.config import TrainConfig
from drm_triton.data.prepare.build import BuildOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source
from drm_triton.data.verify import find_problem
from drm_triton.training import checkpoint
from drm_triton.training.run import read_environment, read_metrics


class Files:
    """Files in a folder, of which one at a time is changed.

    Parameters
    ----------
    files : the files that are changed
    read : reads them and returns what they hold, in a form that can be compared
    exact : whether what is accepted must be equal to the original; text files are free to say something else
    """

    def __init__(self, files: list[Path], read: Callable[[], Any], exact: bool) -> None:
        self.places = {file.name: file for file in files}
        self.inputs = {file.name: file.read_bytes() for file in files}
        self._read, self.exact, self._changed = read, exact, ""
        self.expected = read()

    def read(self, name: str, content: bytes) -> str | None:
        """Read all files, one of them changed."""
        if self._changed not in ("", name):
            self.places[self._changed].write_bytes(self.inputs[self._changed])
        self.places[name].write_bytes(content)
        self._changed = name
        found = self._read()
        return "damaged data was accepted" if self.exact and found != self.expected else None


def store_kind(folder: Path) -> Files:
    """Make a data set with text ids, titles and weights."""
    rng = np.random.default_rng(1)
    rows = [(f"user {u}", i, float(w)) for u in range(12) for i, w in enumerate(rng.integers(0, 4, 15)) if w]
    frame = pl.DataFrame(rows, schema=["user", "item", "plays"], orient="row")
    data = Dataset.from_frame(frame, weight="plays")
    items = data.items.with_columns(title=pl.format("title of {}", pl.col("id")))
    Dataset(data.train, data.valid, data.test, data.users, items, data.meta).save(folder / "data")

    def read() -> Any:
        found = Dataset.load(folder / "data")
        matrices = [getattr(found, name) for name in ("train", "valid", "test")]
        arrays = [[part.indptr.tolist(), part.indices.tolist(), part.weights.tolist()] for part in matrices]
        return arrays, found.user_ids.to_list(), found.items.to_dict(as_series=False)

    return Files(sorted((folder / "data").iterdir()), read, exact=True)


def model_kind(folder: Path) -> Files:
    """Make a saved model."""
    data = Dataset.from_csr(([0, 2, 3, 5], [1, 0, 1, 0, 2]), n_items=4)
    DRM(factors=4, epochs=1, backend="reference").fit(data).save(folder / "model")
    file = folder / "model" / checkpoint.FILE
    return Files([file], reader_of(file), exact=True)


def reader_of(file: Path) -> Callable[[], Any]:
    """Return a function that reads a model file."""

    def read() -> Any:
        tensors, metadata = checkpoint.read_tensors(file)
        config = DRM.stored_config(metadata["config"], str(file))
        return config.to_dict(), {name: tensor.tolist() for name, tensor in tensors.items()}

    return read


def shards_kind(folder: Path) -> Files:
    """Make a saved model whose factors are in two shards."""
    model_kind(folder)
    place = folder / "model"
    tensors, metadata = checkpoint.read_tensors(place / checkpoint.FILE)
    metadata = {name: metadata[name] for name in ("model", "config")}
    totals = {name: len(tensor) for name, tensor in tensors.items()}
    described = [
        checkpoint.write_shard(
            place,
            "e1-p0",
            rank,
            2,
            {name: tensor[2 * rank : 2 + 2 * rank] for name, tensor in tensors.items()},
            dict.fromkeys(tensors, 2 * rank),
            totals,
        )
        for rank in range(2)
    ]
    checkpoint.write_manifest(place / checkpoint.FILE, described, metadata)
    return Files(
        [place / checkpoint.FILE, *sorted(place.glob("model-*"))], reader_of(place / checkpoint.FILE), exact=True
    )


def config_kind(folder: Path) -> Files:
    """Make a configuration."""
    file = folder / "config.toml"
    options = 'score = "l2"\nfactors = 16\nobjective = "hinge+drm"\nrho = 5\nlambda = 3.5\nlr = 1e-2\n'
    file.write_text(f'{options}epochs = 7  # few\nmonitor = "recall@20"\n', "utf-8")
    return Files([file], lambda: TrainConfig.from_toml(file).to_toml(), exact=False)


def run_kind(folder: Path) -> Files:
    """Make the text files that a run records."""
    data = Dataset.from_csr(([0, 2, 3, 5], [1, 0, 1, 0, 2]), n_items=4)
    run = folder / "run"
    DRM(factors=4, epochs=2, backend="reference", eval_every=0).fit(data, run=run)

    def read() -> Any:
        return read_environment(run)["data"], read_metrics(run)

    return Files([run / name for name in ("env.json", "metrics.jsonl")], read, exact=False)


class Tables:
    """Raw tables in all forms that `prepare` reads. A data set that is made of a changed one must be sound.

    What zip and gzip hold has a checksum, so that it must be what it was.
    """

    packed = ("a.csv.gz", "a.zip")

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.options = folder, find_source("table"), BuildOptions(ratios=(1, 0, 0))
        rng = np.random.default_rng(2)
        rows = [
            (f"u{u}", int(i), float(r), 1_700_000_000 + 100 * u)
            for u in range(9)
            for i, r in rng.integers(1, 6, (4, 2))
        ]
        frame = pl.DataFrame(rows, schema=["user", "item", "rating", "timestamp"], orient="row").unique(
            ["user", "item"], maintain_order=True
        )
        text, parquet, archive = frame.write_csv().encode(), io.BytesIO(), io.BytesIO()
        frame.write_parquet(parquet)
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as members:
            members.writestr("b.csv", text)
        self.inputs = {
            "a.csv": text,
            "b.csv": text.replace(b"\n", b'"\n').replace(b",1", b',"1').replace(b'timestamp"', b"timestamp"),
            "a.tsv": frame.write_csv(separator="\t").encode(),
            "a.jsonl": frame.write_ndjson().encode(),
            "a.json": json.dumps(frame.to_dicts()).encode(),
            "a.parquet": parquet.getvalue(),
            "a.csv.gz": gzip.compress(text, mtime=0),
            "a.zip": archive.getvalue(),
        }
        self.expected = self._content("a.csv", text)

    def _content(self, name: str, content: bytes) -> Any:
        (self.folder / name).write_bytes(content)
        self.data = prepare(
            self.source, [self.folder / name], self.folder / "out", options=self.options, overwrite=True
        )
        return self.data.checksum

    def read(self, name: str, content: bytes) -> str | None:
        """Prepare a changed table."""
        found = self._content(name, content)
        problem = find_problem({"train": self.data.train})
        if problem:
            return problem
        return "damaged data was accepted" if name in self.packed and found != self.expected else None


table_kind = Tables
