"""`drm-triton export`: the factors for other programs."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from drm_triton.cli.complete import RunArgument

Format = Literal["npz", "parquet", "faiss", "hnswlib"]


def export(
    run: RunArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.", show_default=False)],
    to: Annotated[Format, typer.Option(help="Arrays, tables, or an index to search.")] = "npz",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write user and item factors, with ids as in your data, for other programs to use.

    npz and parquet hold the factors; faiss and hnswlib an index over the items as well, by inner product or distance
    as the score is, with its recall against exact search measured. export.json says how to query each.

    Examples:

      drm-triton export runs/melon --to npz melon-factors

      drm-triton export runs/melon --to parquet melon-tables

      drm-triton export runs/melon --to faiss melon-index --overwrite
    """
    from drm_triton.export import GOOD_RECALL
    from drm_triton.export import export as write
    from drm_triton.model import DRM
    from drm_triton.progress import Reporter

    manifest = write(DRM.load(run), directory, to, overwrite, Reporter(quiet=quiet or as_json))
    recall = {name: value for name, value in manifest.items() if name.startswith("recall@")}
    if as_json:
        print(json.dumps(manifest, ensure_ascii=False))
    else:
        sizes = f"{manifest['users']:,} users, {manifest['items']:,} items, {manifest['dimension']} factors"
        print(f"exported {run} to {directory}: {sizes}, score {manifest['score']}")
        for name, content in manifest["files"].items():
            print(f"  {name:<18}{content}")
        if recall:
            shares = ", ".join(f"{name} {value:.4f}" for name, value in recall.items())
            print(f"{shares} of exact search, {manifest['queries']:,} users as queries, ef {manifest['ef']}")
        print(f"how to query it: {directory / 'export.json'}")
    if any(value < GOOD_RECALL for value in recall.values()):
        print(f"warning: the index misses more than {1 - GOOD_RECALL:.0%} of the best items", file=sys.stderr)
