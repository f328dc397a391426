"""Fuzzing of what the program reads back: data sets, model files, and the text files of a run.

A case changes one file at random: bits, cut ends, blocks of zeros, repeated or inserted pieces, and in text also values
of extreme or wrong kinds. The file must then be refused with an `InputError` (or `DrmError`), or be read as what it was
before. Everything else is a finding: another exception, a crash, or damaged data that is accepted.

    python -m bench.fuzz --cases 100000             # of each kind
    python -m bench.fuzz --kind store --seed 7

The inputs in `tests/bench/corpus` were findings once, or are of a kind that would be; all of them must be refused.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from drm_triton import DRM, Dataset
from drm_triton.config import TrainConfig
from drm_triton.errors import DrmError
from drm_triton.training import checkpoint
from drm_triton.training.run import read_environment, read_metrics

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "bench" / "corpus"
BATCH = 2000  # cases in one process, so that a crash is found and does not end the rest
WORDS = [
    b"-1", b"0", b"1e400", b"NaN", b"Infinity", b"null", b"true", b'""', b"[]", b"{}", b"99999999999999999999",
    b"9223372036854775807", b"-9223372036854775808", b"1.5", b'"x"', b"\xff\xfe", b"\x00", "٣".encode(), b"[" * 3000,
]  # fmt: skip


class Kind:
    """Files of one kind, in a folder, and how they are read.

    Attributes
    ----------
    files : the files that are changed
    read : reads them and returns what they hold, in a form that can be compared
    exact : whether what is accepted must be equal to the original; text files are free to say something else
    """

    def __init__(self, files: list[Path], read: Callable[[], Any], exact: bool) -> None:
        self.files, self.read, self.exact = files, read, exact
        self.original = {file: file.read_bytes() for file in files}
        self.expected = read()


def store_kind(folder: Path) -> Kind:
    """Make a data set with text ids, titles and weights."""
    rng = np.random.default_rng(1)
    rows = [(f"user {u}", i, float(w)) for u in range(12) for i, w in enumerate(rng.integers(0, 4, 15)) if w]
    frame = pl.DataFrame(rows, schema=["user", "item", "plays"], orient="row")
    data = Dataset.from_frame(frame, weight="plays")
    Dataset(
        data.train,
        data.valid,
        data.test,
        data.users,
        data.items.with_columns(title=pl.format("title of {}", pl.col("id"))),
        data.meta,
    ).save(folder / "data")

    def read() -> Any:
        found = Dataset.load(folder / "data")
        matrices = [getattr(found, name) for name in ("train", "valid", "test")]
        arrays = [[part.indptr.tolist(), part.indices.tolist(), part.weights.tolist()] for part in matrices]
        return arrays, found.user_ids.to_list(), found.items.to_dict(as_series=False)

    return Kind(sorted((folder / "data").iterdir()), read, exact=True)


def model_kind(folder: Path) -> Kind:
    """Make a saved model."""
    data = Dataset.from_csr(([0, 2, 3, 5], [1, 0, 1, 0, 2]), n_items=4)
    DRM(factors=4, epochs=1, backend="reference").fit(data).save(folder / "model")

    def read() -> Any:
        model = DRM.load(folder / "model")
        return model.config.to_dict(), {name: tensor.tolist() for name, tensor in model.tensors.items()}

    return Kind([folder / "model" / checkpoint.FILE], read, exact=True)


def shards_kind(folder: Path) -> Kind:
    """Make a saved model whose factors are in two shards."""
    kind, place = model_kind(folder), folder / "model"
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
    return Kind([place / checkpoint.FILE, *sorted(place.glob("model-*"))], kind.read, exact=True)


def text_kind(folder: Path) -> Kind:
    """Make the text files of a run."""
    data = Dataset.from_csr(([0, 2, 3, 5], [1, 0, 1, 0, 2]), n_items=4)
    run = folder / "run"
    DRM(factors=4, epochs=2, backend="reference", eval_every=0).fit(data, run=run)

    def read() -> Any:
        config = TrainConfig.from_toml(run / "config.toml")
        return config.to_toml(), read_environment(run)["data"], read_metrics(run)

    return Kind([run / name for name in ("config.toml", "env.json", "metrics.jsonl")], read, exact=False)


KINDS = {"store": store_kind, "model": model_kind, "shards": shards_kind, "text": text_kind}


def changed(content: bytes, rng: random.Random) -> bytes:
    """Return a file with one to four random changes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        size = min(rng.choice([1, 2, 4, 8, 64, 4096]), len(data) - at)
        how = rng.randrange(7)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at : at + size] = bytes(size)
        elif how == 3:
            data[at : at + size] = rng.randbytes(size)
        elif how == 4:
            data[at:at] = data[at : at + size]
        elif how == 5:
            del data[at : at + size]
        else:
            data[at : at + rng.choice([0, 1, 2, 4])] = rng.choice(WORDS)
        if not data:
            break
    return bytes(data)


def finding(kind: Kind, file: Path, content: bytes) -> str | None:
    """Read a changed file. Return what is wrong with the outcome, None if nothing is."""
    file.write_bytes(content)
    try:
        found = kind.read()
    except DrmError:
        return None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        file.write_bytes(kind.original[file])
    if kind.exact and found != kind.expected:
        return "damaged data was accepted"
    return None


def fuzz(name: str, cases: int, seed: int, keep: Path | None = None) -> list[str]:
    """Read random changes of the files of a kind. Return the findings; `keep` is a folder for what led to them."""
    findings, rng = [], random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        kind = KINDS[name](Path(folder))
        for number in range(cases):
            file = rng.choice(kind.files)
            content = changed(kind.original[file], rng)
            if content == kind.original[file]:
                continue
            if keep is not None:  # before it is read, which may be the end of the process
                (keep / f"{name}--{file.name}--{seed}").write_bytes(content)
            problem = finding(kind, file, content)
            if problem:
                findings.append(f"{name}, {file.name}, seed {seed}, case {number}: {problem}")
                if keep is not None:
                    (keep / f"{name}--{file.name}--{seed}-{number}").write_bytes(content)
        if keep is not None:
            for file in kind.files:
                (keep / f"{name}--{file.name}--{seed}").unlink(missing_ok=True)
    return findings


def refused(name: str, inputs: list[Path]) -> dict[str, str | None]:
    """Read kept inputs; return the error that refused each, None if one was accepted."""
    outcomes: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        kind = KINDS[name](Path(folder))
        for path in inputs:
            file = next(file for file in kind.files if file.name == path.name.split("--")[1])
            file.write_bytes(path.read_bytes())
            try:
                kind.read()
                outcomes[path.name] = None
            except DrmError as error:
                outcomes[path.name] = str(error)
            finally:
                file.write_bytes(kind.original[file])
    return outcomes


def main() -> None:
    """Fuzz in batches, each in a process of its own, and exit with 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="all by default")
    parser.add_argument("--cases", type=int, default=20_000, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder for inputs of findings")
    parser.add_argument("--batch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.batch:
        findings = fuzz(args.kind[0], args.cases, args.seed, args.keep)
        print("\n".join(findings))
        sys.exit(len(findings) > 0)
    failed = False
    for name in args.kind or KINDS:
        began, done = time.perf_counter(), 0
        while done < args.cases:
            cases = min(BATCH, args.cases - done)
            command = ["--kind", name, "--cases", cases, "--seed", args.seed + done, "--keep", args.keep, "--batch"]
            child = subprocess.run(
                [sys.executable, "-m", "bench.fuzz", *map(str, command)], capture_output=True, text=True
            )
            if child.returncode:
                failed = True
                print(child.stdout.strip() or f"{name}, seed {args.seed + done}: the process died ({child.returncode})")
                print(child.stderr[-2000:])
            done += cases
        print(f"{name}: {done:,} cases, {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
