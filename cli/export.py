"""`drm-triton export`: write factors for other programs."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from drm_triton.cli.complete import RunArgument, VerifyOption, either
from drm_triton.cli.messages import QuietOption
from drm_triton.cli.output import note_if_held_out
from drm_triton.names import ExportFormat


def export(
    run: RunArgument,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Directory to create.", show_default=False)
    ] = None,
    directory_option: Annotated[
        Path | None, typer.Option("--out", "-o", help="The same as DIR.", show_default=False)
    ] = None,
    to: Annotated[
        ExportFormat, typer.Option(help="Format: NumPy arrays, Parquet tables, or a search index of Faiss or hnswlib.")
    ] = "npz",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing export.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print export.json.")] = False,
    verify: VerifyOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write user and item factors, with the ids of your data, for other programs.

    npz and parquet contain the factors of users and items. faiss and hnswlib
    contain a search index over the items, and the factors of the users. The
    index searches by inner product for dot scores and by distance for l2
    scores. Its recall is measured: the fraction of the exact best items that
    it finds. export.json says how to query the export.

    Examples:

      drm-triton export runs/melon --to npz --out melon-factors

      drm-triton export runs/melon --to parquet --out melon-tables

      drm-triton export runs/melon --to faiss --out melon-index --overwrite
    """
    from drm_triton.cli.messages import FlagReporter, first_word
    from drm_triton.errors import InputError

    directory = either(directory, directory_option, "directory")
    if directory is None:
        raise InputError("--out is missing: give the directory to create")
    with first_word(quiet or as_json):
        from drm_triton.export import GOOD_RECALL
        from drm_triton.export import export as write
        from drm_triton.models import load

        model = load(run, verify=verify)
    note_if_held_out(model, run)
    manifest = write(model, directory, to, overwrite, FlagReporter(quiet=quiet or as_json))
    recall = {name: value for name, value in manifest.items() if name.startswith("recall@")}
    if as_json:
        print(json.dumps(manifest, ensure_ascii=False))
    else:
        factors = f", {manifest['dimension']} factors, score {manifest['score']}" if "score" in manifest else ""
        print(f"exported {run} to {directory}:")
        print(f"{manifest['users']:,} users, {manifest['items']:,} items{factors}")
        for name, content in manifest["files"].items():
            print(textwrap.fill(f"  {name:<18}{content}", 80, subsequent_indent=" " * 20, break_on_hyphens=False))
        if recall:
            values = ", ".join(f"{name} {value:.4f}" for name, value in recall.items())
            print(f"{values} against exact search, for {manifest['queries']:,} users with ef {manifest['ef']}")
        print(f"to query it, see {directory / 'export.json'}")
    if any(value < GOOD_RECALL for value in recall.values()):
        print(f"warning: the index misses more than {1 - GOOD_RECALL:.0%} of the best items", file=sys.stderr)
