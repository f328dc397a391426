"""The lengths of the long runs, from their results, as the table of docs/promises.md.

python -m bench.tally            # print it
python -m bench.tally --write    # put it into docs/promises.md
"""

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "promises.md"
TITLE = "## Runs at length\n"
RESUMED = "one training, resumed"  # the row of `bench.kills`
KINDS = ("config", "run", "model", "shards", "http", "store", "table")  # of `bench.fuzz`


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of bench/results/<name>.jsonl or <name>.json; none if it does not exist."""
    lines, table = RESULTS / f"{name}.jsonl", RESULTS / f"{name}.json"
    if lines.exists():
        return [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    if not table.exists():
        return []
    found = json.loads(table.read_text("utf-8"))
    return [{**row, **found["environment"]} for row in found["rows"]]


def total(rows: list[dict[str, Any]], key: str) -> int:
    """Return the sum of a column."""
    return int(sum(row[key] for row in rows))


def when(rows: list[dict[str, Any]]) -> str:
    """Return processor and last date of rows."""
    return f"{rows[-1]['processor']}, {max(row['date'] for row in rows)[:10]}" if rows else "not yet"


def tally() -> str:
    """Return the table in Markdown."""
    faults, kills, fuzz, soak = (rows_of(name) for name in ("faults", "kills", "fuzz", "soak"))
    once = [row for row in kills if row["command"] != RESUMED]
    resumed = [row for row in kills if row["command"] == RESUMED]
    done = f"{total(faults, 'faults'):,} faults in {', '.join(dict.fromkeys(row['command'] for row in faults))}"
    open_rows = [row for row in faults if row["faults"] < row["changes"]]
    rest = "".join(f"; {row['command']} ({row['mode']}) {row['faults']} of {row['changes']}" for row in open_rows)
    cases = {kind: total([row for row in fuzz if row["kind"] == kind], "cases") for kind in KINDS}
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in cases.items())
    lines = [
        "| what | length so far | lost, accepted or failed | command | machine and date |",
        "|---|---|---|---|---|",
        f"| faults in changes of files | {done}{rest} | {total(faults, 'lost')} | `python -m bench.faults --save` | "
        f"{when(faults)} |",
        f"| SIGKILL at random moments | {total(once, 'kills'):,} of 500, {total(once, 'running'):,} of them before the "
        f"command had ended | {total(once, 'lost')} | `python -m bench.kills --save` | {when(once)} |",
        f"| one training, killed and resumed | {total(resumed, 'kills'):,} of 200 times | {total(resumed, 'lost')} | "
        f"`python -m bench.kills --save` | {when(resumed)} |",
        f"| fuzzing | {total(fuzz, 'cases'):,} of 1,000,000 cases: {kinds} | {total(fuzz, 'findings')} | "
        f"`python -m bench.fuzz --save` | {when(fuzz)} |",
    ]
    for row in soak:
        lines.append(
            f"| the service under mixed load | {row['minutes']:g} minutes, {row['requests']:,} requests, "
            f"{row['reloads']} reloads, p99 {row['p99_ms']:,.0f} ms (load {row['load']}), memory times "
            f"{row['memory_growth']:.3f} | {row['errors']} | `python -m bench.soak --save` | {when(soak)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(tally(), end="")
        return
    before, _, after = PAGE.read_text("utf-8").partition(TITLE)
    text, table = after.split("\n| what |", 1)
    rest = table.split("\n\n", 1)
    PAGE.write_text(f"{before}{TITLE}{text}\n{tally()}" + (f"\n{rest[1]}" if len(rest) > 1 else ""), "utf-8")


if __name__ == "__main__":
    main()
