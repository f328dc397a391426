"""`drm-triton info`: print the statistics of a prepared data set."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drm_triton.cli import complete
from drm_triton.cli.messages import QuietOption, first_word, in_flags
from drm_triton.progress import counted

if TYPE_CHECKING:
    from drm_triton.data.dataset import Dataset


def info(
    dataset: complete.DatasetArgument = None,
    dataset_option: complete.DatasetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as one JSON object.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Verify a data set, and print its statistics and what is published about it.

    Everything is read, and its checksum is computed again. A damaged data set is an error.

    These are the statistics in the paper, if it uses the data set, and for a public split the published results.

    Examples:

      drm-triton info melon

      drm-triton info data/ratings --json
    """
    from drm_triton.data import find_dataset

    path = find_dataset(complete.required_dataset(dataset, dataset_option))
    with first_word(as_json or quiet):
        from drm_triton.data.dataset import Dataset

        data = Dataset.load(path)
        data.verify()
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
        "dropped": data.dropped.nnz,
        "dropped_elsewhere": 0 if data.dropped_elsewhere is None else len(data.dropped_elsewhere),
        "per_user": data.n_interactions / data.n_users if data.n_users else 0.0,
        "per_item": data.n_interactions / data.n_items if data.n_items else 0.0,
        "density": data.n_interactions / cells if cells else 0.0,
        "weights": data.meta.get("weights"),
        "published": published,
        "public_split": data.meta.get("public_split"),
        "leaderboard": [result.to_dict() for result in leaderboard(data.meta)],
        "options": data.meta.get("options"),
        "columns": data.meta.get("columns"),
        "titles": _titles(data),
        "ignored_columns": data.meta.get("ignored_columns"),
        "notes": data.meta.get("notes"),
        "skipped": data.meta.get("skipped"),
        "events": data.meta.get("events"),
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
    of_bad_rows = (facts["skipped"] or {}).get("pairs", 0)
    for name, pairs in (("dropped by filters", facts["dropped"] - of_bad_rows), ("in bad rows only", of_bad_rows)):
        if pairs:
            print(f"{name:<22}{pairs:>14,}  never recommended, not learned from")
    if facts["dropped_elsewhere"]:
        print(f"{'dropped elsewhere':<22}{facts['dropped_elsewhere']:>14,}  their user or item left the data set too")
    for line in _columns(data.meta):
        print(line)
    titles = facts["titles"]
    if titles:
        origin = f" ({titles['file']}: item ← {titles['item']}, title ← {titles['title']})" if "file" in titles else ""
        counts = f"{titles['found']:,} of {data.n_items:,} items have one, {titles['missing']:,} have none"
        print(_line(f"titles: {counts}{origin}", 8))
    for name, entry in (data.meta.get("attributes") or {}).items():
        columns = "; ".join(f"{column} ({kind})" for column, kind in entry["columns"].items()) or "none"
        print(textwrap.fill(f"attributes of {name}: {columns}", 80, initial_indent="\n", subsequent_indent="  "))
        rows_read, added = counted(entry["rows"], "row"), counted(entry["added"], name.removesuffix("s"))
        print(f"  {rows_read} in {entry['file']}; {added} without interactions added")
        for line in _skipped(entry):
            print(textwrap.indent(line, "  "))
    weights = facts["weights"]
    if weights:
        column = f" (column {weights['column']})" if "column" in weights else ""
        print(f"\nweights from {weights['least']:g} to {weights['most']:g}, mean {weights['mean']:g}{column}")
    for line in _steps(data.meta):
        print(line)
    options = data.meta.get("options")
    if options:
        print(f"\nsplit {split_text(options)}")
    if facts["leaderboard"]:
        print(f"\n{'results for this split':<28}{'recall@20':>10}{'ndcg@20':>10}  from")
    for row in facts["leaderboard"]:
        print(f"{row['model']:<28}{row['recall@20']:>10.4f}{row['ndcg@20']:>10.4f}  {row['source']}")


def _columns(meta: Mapping[str, Any]) -> list[str]:
    """Return lines that say which column was taken for what, what was ignored, and what to consider."""
    columns = meta.get("columns")
    if not columns:
        return []
    width = min(max(len(entry["column"]) for entry in columns.values()), 24)
    lines = [""]
    for role, entry in columns.items():
        if role == "rating" and "used" in entry:
            continue  # the column was named as the weight
        facts = []
        if "least" in entry:
            facts.append(f"{_value(role, entry['least'])} … {_value(role, entry['most'])}")
        if entry.get("first") is not None:
            facts.append(f"first {textwrap.shorten(str(entry['first']), 24, placeholder=' …')}")
        if entry.get("used") is False:
            facts.append("not used")
        elif role == "rating" and (meta.get("options") or {}).get("min_rating") is None:
            facts.append("all above 0 count alike")
        lines.append(_line(f"{role:<9} ← {entry['column']:<{width}}  {'; '.join(facts)}", 14 + width))
    ignored = meta.get("ignored_columns")
    if ignored:
        shown = ", ".join(ignored[:20]) + (f" and {len(ignored) - 20:,} more" if len(ignored) > 20 else "")
        lines.append(_line(f"ignored: {shown}", 9))
    flags = {name: f"--{name.replace('_', '-')}" for name in ("weight", "rating", "event_weight")}
    return lines + [_line(f"note: {in_flags(note, flags)}", 6) for note in meta.get("notes") or ()]


def _titles(data: "Dataset") -> dict[str, Any] | None:
    """Return how many items have a title, and the columns they come from, or None if the data has no titles."""
    if data.item_titles is None:
        return None
    found = data.item_titles.count()
    return {"found": found, "missing": data.n_items - found, **(data.meta.get("title_columns") or {})}


def _value(role: str, value: Any) -> str:
    """Return a number in the form of its role: ids and unix times have no separators."""
    if isinstance(value, str) or role not in ("rating", "weight"):
        return str(value)
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def _line(text: str, indent: int) -> str:
    return textwrap.fill(text, 80, subsequent_indent=" " * indent, break_on_hyphens=False)


def _steps(meta: Mapping[str, Any]) -> list[str]:
    """Return a table of the steps of the preparation and what each removed."""
    steps = meta.get("steps") or []
    lines = ["", f"{'step':<36}{'interactions':>13}{'removed':>11}{'users':>10}{'items':>10}"] if steps else []
    before = None
    for step in steps:
        name, rows = step["step"], step["interactions"]
        if len(name) > 35:
            lines.append(_line(name, 2))
            name = ""
        removed = "" if before is None else f"{before - rows:,}"
        lines.append(f"{name:<36}{rows:>13,}{removed:>11}{step['users']:>10,}{step['items']:>10,}")
        before = rows
    events = meta.get("events")
    if events:
        counts = ", ".join(f"{event or '(none)'} {rows:,}" for event, rows in events.items())
        lines.append(_line(f"rows of each event: {counts}", 2))
    return lines + _skipped(meta)


def _skipped(record: Mapping[str, Any]) -> list[str]:
    """Return a line about the rows that were skipped, if there are any."""
    from drm_triton.data.prepare.description import skipped_text

    skipped = record.get("skipped")
    if not skipped:
        return []
    return [_line(f"skipped before: {counted(skipped['rows'], 'row')}; {skipped_text(skipped)}", 2)]


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
