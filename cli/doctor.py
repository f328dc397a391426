"""`drm-triton doctor`: check the installation."""

import json
from typing import Annotated, Any

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Check the installation: print versions, processor, GPU and memory, and test each backend in seconds.

    The exit code is 1 if the default backend fails its test.

    Examples:

      drm-triton doctor

      TRITON_INTERPRET=1 drm-triton doctor    # test the Triton kernels without a GPU

      drm-triton doctor --json > doctor.json
    """
    from drm_triton.cli.messages import FlagReporter
    from drm_triton.doctor import examine

    with FlagReporter(quiet=as_json).step("check the installation (the first time compiles kernels)"):
        report = examine()
    print(json.dumps(report, ensure_ascii=False) if as_json else format_report(report))
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
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<14}{value}" for name, value in rows), ""]
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


def _verdict(report: dict[str, Any]) -> str:
    chosen, by = report["backend"]["chosen"], report["backend"]["by"]
    if not chosen:
        return "No backend can run on this machine. The lines above say why."
    if not report["ok"]:
        return f"Backend {chosen} (chosen by {by}) FAILS its self-test."
    return f"Backend {chosen} (chosen by {by}) works."


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
