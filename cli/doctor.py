"""`drm-triton doctor`: check the installation."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drm_triton.cli.messages import QuietOption
from drm_triton.issue_file import NAME


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Check values and speed of the default backend over many sizes, in minutes.")
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            help="With --deep: file for the findings, without personal data, to send with an issue. Older findings in "
            "it are replaced."
        ),
    ] = Path(NAME),
    quiet: QuietOption = False,
) -> None:
    """Check the installation: print versions, processor, GPU and memory, and test each backend in seconds.

    The exit code is 1 if the default backend fails its test.

    Examples:

      drm-triton doctor

      TRITON_INTERPRET=1 drm-triton doctor    # test the Triton kernels without a GPU

      drm-triton doctor --json > doctor.json

      drm-triton doctor --deep    # the first run on a GPU
    """
    from drm_triton.atomic import check_file
    from drm_triton.cli.messages import FlagReporter, first_word

    with first_word(as_json or quiet):
        from drm_triton.doctor import examine
        from drm_triton.issue_file import add_section

    if deep:
        check_file(out, "give another file with `out`")
    with FlagReporter(as_json or quiet).step("check the installation (the first time compiles kernels)"):
        report = examine(deep)
    print(json.dumps(report, ensure_ascii=False) if as_json else format_report(report))
    if deep:
        add_section(out, "doctor", {key: value for key, value in report.items() if key != "data"})
        if not as_json:
            print(f"The findings are in {out}. Please attach it to an issue about this machine.")
    if not report["ok"]:
        raise typer.Exit(1)


def format_report(report: dict[str, Any]) -> str:
    """Format the report as sections of aligned lines."""
    sections = {
        "Versions": _versions(report),
        "Machine": _machine(report),
        "GPU": _gpu(report["gpu"]),
        "Backends": _backends(report),
        "Extras": _extras(report["extras"]),
    }
    if "deep" in report:
        sections["Deep check"] = _deep(report)
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<13} {value}" for name, value in rows), ""]
    return "\n".join([*lines, _verdict(report)])


Rows = list[tuple[str, str]]


def _versions(report: dict[str, Any]) -> Rows:
    rows = [
        ("drm-triton", f"{report['drm_triton']['version']}  ({report['drm_triton']['path']})"),
        ("Python", f"{report['python']['version']}  ({report['python']['path']})"),
    ]
    for name, package in report["packages"].items():
        version = package["version"] or "not installed"
        rows.append((name, f"{version}  BROKEN: {package['error']}" if package["error"] else version))
    return rows


def _machine(report: dict[str, Any]) -> Rows:
    machine, data = report["machine"], report["data"]
    limit = "" if machine["cpu_limit"] is None else f", of which {machine['cpu_limit']:g} can be used"
    rows = [
        ("system", machine["system"]),
        ("processor", f"{machine['processor'] or 'unknown'}; {machine['cores']} cores{limit}"),
    ]
    if machine["threads"]:
        rows.append(("threads", ", ".join(f"{name} {count}" for name, count in machine["threads"].items())))
    memory = machine["memory"]
    if memory:
        limit = f", limited to {_gib(memory['limit'])}" if memory["limit"] else ""
        rows.append(("memory", f"{_gib(memory['free'])} free of {_gib(memory['total'])}{limit}"))
    else:
        rows.append(("memory", "unknown"))
    if data:
        absent = "" if data["exists"] else ", not created yet"
        rows.append(("data", f"{data['directory']} (from {data['by']}{absent}), {_gib(data['free'])} free"))
    return rows


def _gpu(gpu: dict[str, Any]) -> Rows:
    rows = [
        (f"number {number}", f"{device['name']}, capability {device['capability']}, {_gib(device['memory'])}")
        for number, device in enumerate(gpu["devices"])
    ]
    if gpu["reason"] or not rows:
        rows.append(("none usable" if rows else "none", gpu["reason"] or "torch cannot be imported"))
    return [*rows, ("driver", gpu["driver"] or "neither nvidia-smi nor rocm-smi is installed")]


def _backends(report: dict[str, Any]) -> Rows:
    chosen = report["backend"]["chosen"]
    rows = []
    for name, backend in report["backends"].items():
        if backend["status"] == "ok":
            text = f"ok ({backend['place']}, {backend['seconds']:.1f} s): "
            text += f"within {backend['difference']:.0e} of the float64 reference"
        else:
            text = f"{backend['status'].replace('failed', 'FAILED')}: {backend['reason']}"
        rows.append((f"{name} *" if name == chosen else name, text))
    rows.sort(key=lambda row: not row[0].endswith("*"))
    if not chosen:
        rows.insert(0, ("none", report["backend"]["reason"] or "unknown"))
    return rows


def _extras(extras: dict[str, bool]) -> Rows:
    return [
        (name, "installed" if installed else f"not installed: pip install 'drm-triton[{name}]'")
        for name, installed in extras.items()
    ]


def _deep(report: dict[str, Any]) -> Rows:
    deep = report["deep"]
    if not deep.get("checks"):
        return [("problem", text) for text in deep["problems"]]
    rows = [("backend", f"{deep['backend']} ({deep['place']})")]
    if report["gpu"]["reason"]:
        rows.append(("no GPU", f"{report['gpu']['reason']}. So this says nothing about a GPU."))
    repeatable = sum(row["repeatable"] for row in deep["checks"])
    rows.append(("values", f"{len(deep['checks'])} checks, {repeatable} with the same bits twice"))
    for dtype, difference in deep["largest_difference"].items():
        if difference is not None:
            rows.append((dtype, f"within {difference:.0e} of the float64 reference"))
    machine = deep["machine"]
    if machine:
        rows.append(("launch", f"{machine['launch_us']:.1f} us, torch {machine['torch_launch_us']:.1f} us"))
        rows.append(("bandwidth", f"{machine['bandwidth_gb_s']:.0f} GB/s"))
    for row in deep["times"]:
        times = f"{row['ns_per_list']:.0f} ns a list, {row['times_floor']:.1f} times the floor"
        rows.append((row["operation"], f"{row['case']}: {times}"))
    rows += deep["sanitizer"].items()
    return rows + [("PROBLEM", text) for text in deep["problems"]]


def _verdict(report: dict[str, Any]) -> str:
    chosen, by = report["backend"]["chosen"], report["backend"]["by"]
    if not chosen:
        return "No backend can run on this machine. The lines above say why."
    if not report["ok"]:
        failed = "deep check" if report["backends"][chosen]["status"] == "ok" else "self-test"
        return f"Backend {chosen} (chosen by {by}) FAILS its {failed}."
    return f"Backend {chosen} (chosen by {by}) works."


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
