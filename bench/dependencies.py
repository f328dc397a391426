"""What the package depends on: the lowest versions to test, the licences, and a bill of materials (SBOM).

    python bench/dependencies.py lowest             # requirements for pip: each dependency at its lower bound
    python -m bench.dependencies licences           # a table; fails if a licence is unknown or restricts use
    python -m bench.dependencies sbom               # CycloneDX 1.5, JSON

`lowest` reads pyproject.toml and needs no other package, because it runs before any is installed. The other two read
what is installed, without the network: the package, its dependencies and those of its extra `serve`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
NAME, EXTRAS = "drm-triton", ("serve",)
AS_INSTALLED = ("torch",)  # one build is tested, and pip chooses it
NEEDS_NEWER = ("irspack",)  # test packages that ask for newer versions; their tests are skipped
LOWEST = (*EXTRAS, "faiss")  # extras at their lower bounds
PINNED = ("pyparsing<3.3",)  # of Matplotlib, whose lowest version uses names that are deprecated since
RESTRICTS = re.compile(r"\b(A?GPL|SSPL|BUSL|Commons Clause|proprietary)", re.IGNORECASE)


def lowest() -> Iterator[str]:
    """Yield the requirements of the package at their lower bounds, and those of its tests as they are."""
    import tomllib

    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    bounded = [line for extra in LOWEST for line in extras[extra]]
    for line in [*project["dependencies"], *bounded]:
        name, bounds, marker = re.fullmatch(r"([\w.-]+)([^;]*)(;.*)?", line).groups()  # type: ignore[union-attr]
        bound = re.search(r">=\s*([\w.]+)", bounds)
        yield line if bound is None or name in AS_INSTALLED else f"{name}=={bound[1]}{marker or ''}"
    yield from PINNED
    yield from (line for line in extras["test"] if line not in bounded and not line.startswith((NAME, *NEEDS_NEWER)))


def closure() -> dict[str, tuple[metadata.Distribution, list[str]]]:
    """Return the installed distributions that the package needs, by name, each with the names that it needs itself."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, tuple[metadata.Distribution, list[str]]] = {}
    waiting = [(NAME, frozenset(EXTRAS))]
    while waiting:
        name, extras = waiting.pop()
        if name in found:
            continue
        distribution, needs = metadata.distribution(name), []
        for line in distribution.requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                needs.append(canonicalize_name(needed.name))
                waiting.append((needs[-1], frozenset(needed.extras)))
        found[name] = distribution, sorted(set(needs))
    return dict(sorted(found.items()))


def licence(distribution: metadata.Distribution) -> str:
    """Return the licence that a distribution states, "" if it states none."""
    about: Any = distribution.metadata  # a message of `email`, whose methods are not all declared
    classifiers = [line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License ")]
    text = (about.get("License") or "").strip()  # a name, or the whole text
    return about.get("License-Expression") or ", ".join(classifiers) or ("" if "\n" in text else text)


def sbom() -> dict[str, Any]:
    """Return the bill of materials in the form of CycloneDX."""
    packages = closure()

    def reference(name: str) -> str:
        return f"pkg:pypi/{name}@{packages[name][0].version}"

    def component(name: str) -> dict[str, Any]:
        kind = "application" if name == NAME else "library"
        stated = {"licenses": [{"license": {"name": licence(packages[name][0])}}]}
        purl = reference(name)
        return {
            "type": kind,
            "bom-ref": purl,
            "name": name,
            "version": packages[name][0].version,
            "purl": purl,
            **stated,
        }

    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(NAME)},
        "components": [component(name) for name in packages if name != NAME],
        "dependencies": [
            {"ref": reference(name), "dependsOn": [reference(need) for need in needs]}
            for name, (_, needs) in packages.items()
        ],
    }


def licences() -> tuple[str, list[str]]:
    """Return a table of names, versions and licences, and the names whose licence is unknown or restricts use."""
    rows = [(name, found.version, licence(found)) for name, (found, _) in closure().items()]
    table = ["| package | version | licence |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(table), [name for name, _, text in rows if not text or RESTRICTS.search(text)]


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lowest", "licences", "sbom"])
    what = parser.parse_args().what
    if what == "lowest":
        print("\n".join(lowest()))
    elif what == "sbom":
        print(json.dumps(sbom(), indent=1))
    else:
        table, bad = licences()
        print(table)
        if bad:
            sys.exit(f"unknown or restricting licences: {', '.join(bad)}")


if __name__ == "__main__":
    main()
