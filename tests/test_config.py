import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drm_triton import DRM
from drm_triton.config import SEEDS, TAU_RANGE, TrainConfig
from drm_triton.errors import InputError


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "score": st.sampled_from(["dot", "l2"]),
            "factors": st.integers(1, 512),
            "eta": st.integers(1, 100),
            "tau": st.floats(1e-3, 100),
            "lambda": st.floats(0, 100),
            "lr": st.floats(1e-6, 1),
            "seed": st.integers(0, 2**63 - 1),
            "objective": st.sampled_from(["hinge+drm", "hinge", "drm", "mse", "mse+drm"]),
        },
    )
)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, options: dict) -> None:
    config = TrainConfig.from_mapping(options)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(path) == config


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("factors = 32\nlr = 1\n")
    config = TrainConfig.from_toml(path, {"factors": 16})
    assert (config.factors, config.lr) == (16, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"facters": 32}, "unknown configuration key 'facters'; did you mean 'factors'"),
        ({"lamda": 1.0}, "did you mean 'lambda'"),
        ({"factors": 0}, "factors must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"share": 0}, "share must be at least 1, got 0"),
        ({"share": 2**63}, rf"share must be below 2\^31, got {2**63}"),
        ({"factors": 1.5}, "factors must be int, got 1.5"),
        ({"factors": True}, "factors must be int, got True"),
        ({"tau": 0}, "tau must be positive and finite, got 0"),
        ({"tau": "hot"}, "tau must be float, got 'hot'"),
        ({"lambda": "much"}, "lambda must be float, got 'much'"),
        ({"lambda": -1}, "lambda must be finite and at least 0, got -1"),
        ({"lr": float("nan")}, "lr must be positive and finite, got nan"),
        ({"lr": 1e300}, r"lr must be positive and finite, got 1e\+300"),  # in float32
        ({"score": "cosine"}, "score must be one of dot, l2, got 'cosine'"),
        ({"objective": "drm+hinge"}, "objective must be one of hinge"),
        ({"rho": 2, "eta": 3, "k": 6}, "k must be at most rho \\+ eta = 5, got 6"),
        ({"cov": 1.0}, "cov .* goes with score = l2 only"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**63}, "seed must be below 2\\^63 = 9223372036854775808, got 9223372036854775808"),
        ({"tau": 1e-33}, r"tau must be from 1e-32 to 1e\+32, got 1e-33"),
        ({"tau": 1e33}, r"tau must be from 1e-32 to 1e\+32, got 1e\+33"),
        ({"monitor": "auc@10"}, "monitor must be a metric such as ndcg@10"),
        ({"monitor": "ndcg"}, "monitor must be a metric such as ndcg@10"),
    ],
)
def test_bad_values_name_the_key_and_the_rule(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig.from_mapping(values)


def test_the_bounds_are_those_of_the_kernels() -> None:
    from drm_triton.kernels.protocol import ListPlan
    from drm_triton.names import TAU_RANGE as KERNELS_TAU_RANGE

    assert TAU_RANGE == KERNELS_TAU_RANGE
    rows = torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32)
    ListPlan(*rows, 2, 1, 1, seed=SEEDS - 1)
    with pytest.raises(InputError, match="seed must be an integer from 0 to"):
        ListPlan(*rows, 2, 1, 1, seed=SEEDS)


def test_numbers_of_numpy_are_numbers() -> None:
    given = {
        "factors": np.int64(8),
        "eta": np.int32(5),
        "seed": np.uint64(3),
        "tau": np.float32(0.5),
        "lam": np.int8(2),
    }
    plain = {"factors": 8, "eta": 5, "seed": 3, "tau": 0.5, "lam": 2.0}
    for config in (TrainConfig(**given), TrainConfig.from_mapping(given), DRM(**given).config):
        assert config == TrainConfig(**plain)
        assert {name: type(getattr(config, name)) for name in plain} == {name: type(v) for name, v in plain.items()}
    for wrong in (np.float64(8.0), np.bool_(True), "8", None):
        with pytest.raises(InputError, match="factors must be int, got"):
            TrainConfig(factors=wrong)


def test_errors_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    with pytest.raises(InputError, match=r"c\.toml: no such configuration file"):
        TrainConfig.from_toml(path)
    path.write_text("factors = ")
    with pytest.raises(InputError, match=r"c\.toml: not valid TOML"):
        TrainConfig.from_toml(path)
    path.write_text("[model]\nfactors = 3\n")
    with pytest.raises(InputError, match=r"c\.toml: unknown configuration key 'model'"):
        TrainConfig.from_toml(path)


def problem(path: Path, flags: dict) -> str:
    with pytest.raises(InputError) as told:
        TrainConfig.from_toml(path, flags)
    return str(told.value)


def test_an_error_is_blamed_on_the_flag_or_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("rho = 2\nk = 20\n")
    assert problem(path, {"factors": 0}) == "factors must be at least 1, got 0"
    assert problem(path, {"rho": 0}) == "rho must be at least 1, got 0"
    both = "k must be at most rho + eta = 7, got 20"
    assert problem(path, {"eta": 5}) == f"{path} and the options that override it: {both}"
    path.write_text("factors = 0\ncov = 1\n")
    assert problem(path, {"lr": 0.1}) == f"{path}: factors must be at least 1, got 0"
    assert problem(path, {"lr": -0.1, "factors": 4}) == "lr must be positive and finite, got -0.1"
    assert TrainConfig.from_toml(path, {"factors": 4, "score": "l2"}).cov == 1


def test_the_two_names_of_lambda(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for name in ("lam", "lambda"):
        path.write_text(f"{name} = 2\n")
        assert TrainConfig.from_toml(path).lam == 2
        for flag in ("lam", "lambda"):
            assert TrainConfig.from_toml(path, {flag: 3.0}).lam == 3
    path.write_text("lam = 2\nlambda = 2\n")
    for flags in ({}, {"lam": 3.0}):
        assert problem(path, flags) == (
            f"{path}: both 'lam' and 'lambda' are given, which are one option; leave one out"
        )
    with pytest.raises(InputError, match="both 'lam' and 'lambda' are given"):
        TrainConfig.from_mapping({"lam": 2.0, "lambda": 3.0})


def test_every_field_has_a_flag() -> None:
    import inspect

    from drm_triton.cli.train import train

    flags = set(inspect.signature(train).parameters)
    assert {field.name for field in dataclasses.fields(TrainConfig)} <= flags
