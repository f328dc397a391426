"""MkDocs hooks: bring files outside docs/ into the site.

The pages link to each other as files of the repository, so that they can be read on GitHub. MkDocs knows only the files
in docs/. These hooks add the other files that a page links to, under project/, and rewrite the links.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "project"  # the folder of the site that holds files from outside docs/
START = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the start pages, and every file outside docs/ that a page links to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    queue, added = [*pages, *START], set(pages)
    while queue:
        path = queue.pop()
        if path not in added:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
            added.add(path)
        if path.endswith(".md"):
            queue.extend(target for target in linked_files(path) if target not in added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository to links between files of the site."""
    path = repository_path(page.file.src_uri)
    start = os.path.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        target = resolve(path, match[1])
        if (ROOT / target).is_dir():  # the site has no page for a directory
            return f"{os.path.relpath(PROJECT, start)}/README.md#how-it-is-organised"
        return os.path.relpath(site_path(target), start) + (match[2] or "")

    return LINK.sub(rewrite, markdown)


def linked_files(path: str) -> Iterator[str]:
    """Yield the files outside docs/ that a page links to, as paths in the repository."""
    for target, _ in LINK.findall((ROOT / path).read_text("utf-8")):
        file = resolve(path, target)
        if not file.startswith("docs/") and (ROOT / file).is_file():
            yield file


def resolve(path: str, target: str) -> str:
    """Return the path in the repository that a link in the page `path` leads to."""
    return os.path.normpath(os.path.join(os.path.dirname(path), target))


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{PROJECT}/{path}"


def repository_path(uri: str) -> str:
    """Return the file of the repository that a page of the site is made from."""
    return uri.removeprefix(f"{PROJECT}/") if uri.startswith(f"{PROJECT}/") else f"docs/{uri}"
