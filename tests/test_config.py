"""The training configuration: values, files, and what follows from the declaration of an option."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drm_triton import DRM
from drm_triton.config import TrainConfig, of_trained_model
from drm_triton.errors import InputError
from drm_triton.options import checked, choices, declaration, options_page
from tests.conftest import run_python

SAMPLED = {"negatives": "sampled"}


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
            "objective": st.sampled_from(["hinge+drm", "hinge", "drm", "mse", "mse+drm", "softmax", "psl+drm"]),
        },
    )
)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
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
        ({"facters": 32}, "unknown option `facters`; did you mean `factors`?"),
        ({"lamda": 1.0}, "unknown option `lamda`; did you mean `lam`?"),
        ({"nonsense": 1}, "unknown option `nonsense`; the options are score, factors, init, precision, rho,"),
        ({"factors": 0}, "`factors` must be at least 1, got 0"),
        ({"epochs": 0}, "`epochs` must be at least 1, got 0"),
        ({"share": 0}, "`share` must be at least 1, got 0"),
        ({"share": 2**63}, f"`share` must be at most 2147483647, got {2**63}"),
        ({"factors": 1.5}, "`factors` must be int, got 1.5"),
        ({"factors": True}, "`factors` must be int, got True"),
        ({"tau": 0}, "`tau` must be at least 1e-32, got 0.0"),
        ({"tau": "hot"}, "`tau` must be float, got 'hot'"),
        ({"lambda": "much"}, "`lam` must be float, got 'much'"),
        ({"lambda": -1}, "`lam` must be at least 0, got -1"),
        ({"lambda": math.inf}, "`lam` must be finite, got inf"),
        ({"margin": math.nan}, "`margin` must be finite, got nan"),
        ({"lr": 0}, "`lr` must be positive, got 0.0"),
        ({"lr": math.nan}, "`lr` must be finite, got nan"),
        ({"lr": 1e300}, "`lr` must be at most 3.4e+38, got 1e+300"),  # the kernels compute in float32
        ({"score": "hamming"}, "`score` must be one of dot, l2, cosine, got 'hamming'"),
        ({"precision": "float16"}, "`precision` must be one of float32, bfloat16, got 'float16'"),
        ({"objective": "drm+hinge"}, "`objective` must be one of hinge"),
        ({"objective": "drm", "rho": 2, "eta": 3, "k": 6}, "`k` must be at most `rho` + `eta` = 5, got 6"),
        ({"objective": "drm", "k": 102}, "`k` must be at most 101 unless `eta` is given, got 102"),
        ({"cov": 1.0}, "`cov` (covariance regularisation) needs `score` l2"),
        ({"seed": -1}, "`seed` must be at least 0, got -1"),
        ({"seed": 2**63}, "`seed` must be at most 9223372036854775807, got 9223372036854775808"),
        ({"tau": 1e-33}, "`tau` must be at least 1e-32, got 1e-33"),
        ({"tau": 1e33}, "`tau` must be at most 1e+32, got 1e+33"),
        ({"monitor": "auc@10"}, "`monitor` must be a metric such as ndcg@10"),
        ({"monitor": "ndcg"}, "`monitor` must be a metric such as ndcg@10"),
        ({"monitor": "ndcg@٣"}, "`monitor` must be a metric such as ndcg@10"),
        ({"monitor": "ndcg@07"}, "`monitor` must be a metric such as ndcg@10"),
        ({"threads": 100_000}, "`threads` must be at most 1024"),
        ({"monitor": "ndcg@1001"}, "cut-off from 1 to 1000), got 'ndcg@1001'"),
        (
            {"objective": "hinge", "batch_size": 100},
            "`batch_size` 100 is not a multiple of `share` 32: use 96 or 128, or `share` 1",
        ),
        (
            {"objective": "hinge", "batch_size": 16},
            "`batch_size` 16 is not a multiple of `share` 32: use 32, or `share` 1",
        ),
        (
            {"objective": "hinge", "share": 48},
            "`batch_size` 2048 is not a multiple of `share` 48: use 2016 or 2064, or `share` 1",
        ),
        ({"objective": "drm", "negatives": "all"}, "`negatives` all needs `objective` softmax or softmax@k, got drm"),
        ({"objective": "softmax@k", "negatives": "sampled"}, "`objective` softmax@k needs `negatives` all"),
        ({"objective": "psl", "popularity": 0.4}, "`popularity` needs `negatives` all, and so `objective` softmax or"),
        ({"negatives": "sampled", "popularity": 0.4}, "`popularity` needs `negatives` all"),
        ({"score": "l2", "popularity": 0.4}, "`popularity` needs `score` cosine or dot, got l2"),
    ],
)
def test_bad_values_name_the_option_and_the_rule(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        TrainConfig.from_mapping(values)


@pytest.mark.parametrize(("batch_size", "share"), [(1, 1), (97, 1), (32, 32), (96, 32), (2000, 1000)])
def test_a_batch_holds_whole_groups_of_lists(batch_size: int, share: int) -> None:
    assert TrainConfig(negatives="sampled", batch_size=batch_size, share=share).batch_size == batch_size


@pytest.mark.parametrize(
    ("options", "score", "negatives", "k"),
    [
        ({}, "cosine", "all", 1),
        ({"objective": "softmax@k"}, "cosine", "all", 20),
        ({"objective": "softmax@k", "k": 5, "score": "l2"}, "l2", "all", 5),
        ({"objective": "psl"}, "cosine", "sampled", 1),
        ({"objective": "softmax+drm"}, "dot", "sampled", 1),
        ({"objective": "hinge+drm", "rho": 3}, "dot", "sampled", 3),
        ({"negatives": "sampled"}, "cosine", "sampled", 1),
    ],
)
def test_defaults_follow_the_objective(options: dict[str, Any], score: str, negatives: str, k: int) -> None:
    config = TrainConfig(**options)
    assert (config.score_in_force, config.negatives_in_force, config.k_in_force) == (score, negatives, k)
    resolved = config.resolved()
    assert (resolved.score, resolved.negatives, resolved.k) == (score, negatives, k)
    assert resolved.changed() == options


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, []),
        (
            {"rho": 2, "eta": 5, "share": 1, "tau": 1.0, "lam": 2.0, "margin": 0.5},
            ["rho", "eta", "share", "tau", "lam", "margin"],
        ),
        ({"objective": "softmax@k", "tau": 0.2, "k": 5, "weight": "ndcg"}, ["weight"]),
        (
            {"objective": "hinge+drm", "weight": "recall", "temperature": 0.1, "pool": 9},
            ["pool", "weight", "temperature"],
        ),
        ({"objective": "hinge+drm", "weight": "recall", "rho": 2, "k": 1}, []),
        ({"objective": "drm", "weight": "ap"}, []),
        ({"objective": "drm", "weight": "ndcg", "k": 2, "cov_form": "printed"}, ["cov_form"]),
    ],
)
def test_options_without_effect_are_known(options: dict[str, Any], idle: list[str]) -> None:
    assert TrainConfig(**options).without_effect() == idle


def test_a_model_of_version_0_1_with_another_batch_size_can_be_loaded() -> None:
    assert of_trained_model({"batch_size": 16, "share": 32, "rho": 2}) == {"batch_size": 32, "share": 32, "rho": 2}
    assert of_trained_model({"batch_size": 64, "share": 32}) == {"batch_size": 64, "share": 32}


@pytest.mark.parametrize(
    ("options", "n_items", "eta"),
    [
        ({"objective": "hinge+drm"}, 1, 15),
        ({"objective": "softmax+drm"}, 3_499, 15),
        ({"objective": "hinge"}, 3_501, 20),
        ({"objective": "drm"}, 17_632, 90),
        ({"objective": "hinge+drm"}, 10**9, 100),
        ({"objective": "psl"}, 1, 45),
        ({"objective": "bpr"}, 17_632, 90),
        ({"objective": "drm", "rho": 3}, 1_000, 45),
        ({"rho": 20}, 10**9, 300),
        ({"objective": "drm", "k": 60}, 1_000, 60),
        ({"objective": "hinge", "k": 60}, 1_000, 15),  # without effect
        ({"eta": 7}, 10**9, 7),
    ],
)
def test_the_number_of_negatives_follows_the_catalogue(options: dict[str, Any], n_items: int, eta: int) -> None:
    config = TrainConfig(**options)
    assert config.eta_for(n_items) == config.resolved().eta_for(n_items) == eta
    assert config.resolved().eta == options.get("eta")


def test_an_eta_that_was_recorded_without_effect_is_no_change() -> None:
    assert TrainConfig(eta=45).changed() == {}
    assert TrainConfig(eta=45, objective="psl").changed() == {"eta": 45, "objective": "psl"}
    assert TrainConfig(eta=44).without_effect() == ["eta"]


def test_numpy_numbers_are_accepted() -> None:
    given: dict[str, Any] = {
        "factors": np.int64(8),
        "eta": np.int32(5),
        "seed": np.uint64(3),
        "tau": np.float32(0.5),
        "lam": np.int8(2),
    }
    plain: dict[str, Any] = {"factors": 8, "eta": 5, "seed": 3, "tau": 0.5, "lam": 2.0}
    for config in (TrainConfig(**given), TrainConfig.from_mapping(given), DRM(**given).config):
        assert config == TrainConfig(**plain)
        assert {name: type(getattr(config, name)) for name in plain} == {name: type(v) for name, v in plain.items()}
    for wrong in (np.float64(8.0), np.bool_(True), "8", None):
        with pytest.raises(InputError, match="`factors` must be int, got"):
            TrainConfig(factors=wrong)  # type: ignore[arg-type]


def test_errors_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    with pytest.raises(InputError, match=r"c\.toml: no such configuration file"):
        TrainConfig.from_toml(path)
    path.write_text("factors = ")
    with pytest.raises(InputError, match=r"c\.toml: not valid TOML"):
        TrainConfig.from_toml(path)
    path.write_text("[model]\nfactors = 3\n")
    with pytest.raises(InputError, match=r"c\.toml holds the options of the model {'factors': 3}, not those of drm"):
        TrainConfig.from_toml(path)


def problem(path: Path, flags: dict[str, Any]) -> str:
    with pytest.raises(InputError) as raised:
        TrainConfig.from_toml(path, flags)
    return str(raised.value)


def test_an_error_names_the_flag_or_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('objective = "drm"\nrho = 2\nk = 20\n')
    assert problem(path, {"factors": 0}) == "`factors` must be at least 1, got 0"
    assert problem(path, {"rho": 0}) == "`rho` must be at least 1, got 0"
    both = "'k' must be at most 'rho' + `eta` = 7, got 20"  # keys of the file, and an option that overrides it
    assert problem(path, {"eta": 5}) == f"{path} and the options that override it: {both}"
    path.write_text("factors = 0\ncov = 1\n")
    assert problem(path, {"lr": 0.1}) == f"{path}: 'factors' must be at least 1, got 0"
    assert problem(path, {"lr": -0.1, "factors": 4}) == "`lr` must be positive, got -0.1"
    path.write_text("lambda = -1\n")
    assert problem(path, {}) == f"{path}: 'lambda' must be at least 0, got -1.0"
    path.write_text("cov = 1\n")
    assert TrainConfig.from_toml(path, {"factors": 4, "score": "l2"}).cov == 1


def test_the_two_names_of_lambda(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for name in ("lam", "lambda"):
        path.write_text(f"{name} = 2\n")
        assert TrainConfig.from_toml(path).lam == 2
        for flag in ("lam", "lambda"):
            assert TrainConfig.from_toml(path, {flag: 3.0}).lam == 3
    path.write_text("lam = 2\nlambda = 2\n")
    none: dict[str, Any] = {}
    for flags in (none, {"lam": 3.0}):
        assert problem(path, flags) == (f"{path}: 'lam' and 'lambda' are the same option; give only one of them")
    with pytest.raises(InputError, match="'lam' and 'lambda' are the same option"):
        TrainConfig.from_mapping({"lam": 2.0, "lambda": 3.0})


@pytest.mark.parametrize("field", dataclasses.fields(TrainConfig), ids=lambda field: str(field.name))
def test_every_field_is_declared(field: "dataclasses.Field[Any]") -> None:
    declared = declaration(field)
    assert re.fullmatch(r"[A-Z].*[.]", declared.help)
    assert declared.group in ("Model", "Lists", "Loss", "Training")
    assert bool(declared.unset) == (field.default is None)
    assert set(re.findall("`(.*?)`", declared.help)) <= TrainConfig.fields().keys()
    assert all(checked(field, value) == value for value in choices(field) or (field.default,))


def test_docs_list_the_options(repository: Path) -> None:
    page = repository / "docs" / "options.md"
    assert page.read_text("utf-8") == options_page(), "run: python -m drm_triton.options > docs/options.md"
    for field in dataclasses.fields(TrainConfig):
        assert f"| `{field.name}`" in options_page()


def test_configuration_needs_no_torch() -> None:
    code = "import sys, drm_triton.config; print([m for m in ('torch', 'numpy', 'polars') if m in sys.modules])"
    assert run_python("-c", code).stdout == "[]\n"
