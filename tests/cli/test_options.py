"""The options of `train` and `tune` follow from the fields of `TrainConfig`."""

import dataclasses
import re

import pytest

from drm_triton import TrainConfig
from drm_triton.cli.messages import in_flags
from drm_triton.cli.options import FLAGS
from drm_triton.options import FILE_NAMES, declaration, default_text
from tests.conftest import call


@pytest.mark.parametrize("command", ["train", "tune"])
def test_options_of_a_training_follow_from_their_declaration(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = call(command, "--help")
    text = " ".join(out.replace("\u2502", " ").split())
    for field in dataclasses.fields(TrainConfig):
        flag = f"--{FILE_NAMES.get(field.name, field.name).replace('_', '-')}"
        help = in_flags(declaration(field).help, FLAGS)
        if command == "train":
            default = f"[{in_flags(default_text(field), FLAGS)}]"
            assert re.search(rf"{flag} .{{0,20}}{re.escape(help)}[^\[]*{re.escape(default)}", text), flag
        elif declaration(field).search or field.name in ("objective", "backend", "threads"):
            assert re.search(rf"{flag} .{{0,20}}{re.escape(help)}", text), flag
