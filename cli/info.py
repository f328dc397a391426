"""`drm-triton info`: print the statistics of a prepared data set."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drm_triton.cli import complete

if TYPE_CHECKING:
    from drm_triton.data.dataset import Dataset


def info(
    dataset: complete.DatasetArgument = None,
    dataset_option: complete.DatasetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as one JSON object.")] = False,
) -> None:
    """Print the statistics of a data set, and what is published about it.

    These are the statistics in the paper, if it uses the data set, and for a public split the published results.

    Examples:

      drm-triton info melon

      drm-triton info data/ratings --json
    """
    from drm_triton.data import find_dataset
    from drm_triton.data.dataset import Dataset

    path = find_dataset(complete.required_dataset(dataset, dataset_option))
    data = Dataset.load(path)
    if as_json:
        print(json.dumps(summary(data, path), ensure_ascii=False))
    else:
        describe(data, path)


def summary(data: "Dataset", path: Path) -> dict[str, Any]:
    """Return the statistics, ready for JSON."""
    from drm_triton.data.leaderboards import leaderboard

    cells = data.n_users * data.n_items
    published = _published(data)
    return {
        "path": str(path),
        "source": data.meta.get("source"),
        "users": data.n_users,
        "items": data.n_items,
        "interactions": data.n_interactions,
        "train": data.train.nnz,
        "valid": data.valid.nnz,
        "test": data.test.nnz,
        "per_user": data.n_interactions / data.n_users if data.n_users else 0.0,
        "per_item": data.n_interactions / data.n_items if data.n_items else 0.0,
        "density": data.n_interactions / cells if cells else 0.0,
        "weights": data.meta.get("weights"),
        "published": published,
        "public_split": data.meta.get("public_split"),
        "leaderboard": [result.to_dict() for result in leaderboard(data.meta)],
        "options": data.meta.get("options"),
        "steps": data.meta.get("steps"),
        "checksum": data.checksum,
    }


def describe(data: "Dataset", path: Path) -> None:
    """Print the statistics as a table."""
    from drm_triton.data.split import split_text

    facts = summary(data, path)
    published = facts["published"]
    source = data.meta.get("source", "unknown")
    print(f"{path}: {source}{' (synthetic)' if data.meta.get('synthetic') else ''}")
    header = f"{'':<22}{'here':>14}"
    if published:
        header += f"{'published':>14}{'difference':>12}"
    print(header)
    rows = (
        ("users", "{:,}"), ("items", "{:,}"), ("interactions", "{:,}"),
        ("per_user", "{:.1f}"), ("per_item", "{:.1f}"), ("density", "{:.4%}"),
    )  # fmt: skip
    names = {"per_user": "average per user", "per_item": "average per item"}
    for key, form in rows:
        line = f"{names.get(key, key):<22}{form.format(facts[key]):>14}"
        if published:
            line += f"{form.format(published[key]):>14}{facts[key] / published[key] - 1:>+12.1%}"
        print(line)
    total = max(data.n_interactions, 1)
    for name in ("train", "valid", "test"):
        print(f"{name:<22}{facts[name]:>14,}{facts[name] / total:>14.1%}")
    weights = facts["weights"]
    if weights:
        column = f" (column {weights['column']})" if "column" in weights else ""
        print(f"\nweights from {weights['least']:g} to {weights['most']:g}, mean {weights['mean']:g}{column}")
    steps = data.meta.get("steps") or []
    if steps:
        print(f"\n{'step':<42}{'interactions':>14}{'users':>12}{'items':>12}")
    for step in steps:
        print(f"{step['step']:<42}{step['interactions']:>14,}{step['users']:>12,}{step['items']:>12,}")
    options = data.meta.get("options")
    if options:
        print(f"\nsplit {split_text(options)}")
    if facts["leaderboard"]:
        print(f"\n{'results for this split':<28}{'recall@20':>10}{'ndcg@20':>10}  from")
    for row in facts["leaderboard"]:
        print(f"{row['model']:<28}{row['recall@20']:>10.4f}{row['ndcg@20']:>10.4f}  {row['source']}")


def _published(data: "Dataset") -> dict[str, float] | None:
    """Return the statistics in the paper, or None."""
    from drm_triton.data.prepare.sources import SOURCES

    source = SOURCES.get(str(data.meta.get("source")))
    if source is None or source.published is None or data.meta.get("synthetic"):
        return None
    users, items, interactions = (getattr(source.published, k) for k in ("users", "items", "interactions"))
    return {
        "users": users,
        "items": items,
        "interactions": interactions,
        "per_user": interactions / users,
        "per_item": interactions / items,
        "density": interactions / (users * items),
    }
