"""One file with findings about an installation, to send with an issue.

`drm-triton doctor --deep` and, on a GPU, `drm-triton bench kernels` each write a section of it. It contains no path
beyond the names of files, no host name and no user name.
"""

import getpass
import json
import math
import platform
import re
from pathlib import Path
from typing import Any

from drm_triton import atomic
from drm_triton._version import __version__

NAME = "drm-triton-report.json"
FOLDERS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\\/\s\"':;,()<>|]+)*[\\/](?=[^\\/\s\"':;,()<>|])")


def add_section(path: Path, section: str, findings: Any) -> None:
    """Write a section of the file, and keep the other section if the file has one."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or "drm-triton" not in content:
        content = {}
    content |= {"drm-triton": __version__, section: anonymous(findings)}
    atomic.write_text(path, json.dumps(content, indent=1) + "\n")


def anonymous(value: Any) -> Any:
    """Return a JSON value without folders, host name and user name in its texts.

    Examples
    --------
    >>> anonymous({"reason": "ImportError: /home/ann/env/lib/libtorch.so: no such file"})
    {'reason': 'ImportError: …/libtorch.so: no such file'}
    """
    if isinstance(value, dict):
        return {key: anonymous(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [anonymous(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if not isinstance(value, str):
        return value
    text = FOLDERS.sub(lambda found: "…/" if len(found[0]) > 1 else found[0], value)
    for name in filter(None, (platform.node(), _user())):
        text = re.sub(rf"\b{re.escape(name)}\b", "…", text)
    return text


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # the system does not know the user
        return None
