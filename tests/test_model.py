"""`DRM` as Python sees it: its parameters, its threads, and what `fit` takes."""

import dataclasses
import inspect
import pydoc
import re
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import polars as pl
import pytest
import torch
from scipy.sparse import csr_matrix

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.errors import HeldOutWarning, InputError
from drm_triton.kernels.cpu.runtime.threads import n_threads, set_threads
from drm_triton.options import choices, declaration


def plain(text: str) -> str:
    return " ".join(text.split())


def test_the_keywords_of_drm_are_the_fields_of_the_configuration() -> None:
    _, config, *keywords = inspect.signature(DRM.__init__).parameters.values()
    assert (config.name, config.default) == ("config", None)
    fields = dataclasses.fields(TrainConfig)
    assert [(p.name, p.default) for p in keywords] == [(field.name, field.default) for field in fields]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in keywords)
    hints = get_type_hints(inspect.unwrap(DRM.__init__))
    assert {field.name: hints[field.name] for field in fields} == {field.name: field.type for field in fields}
    assert inspect.signature(DRM).parameters.keys() == {"config", *(field.name for field in fields)}


def test_every_keyword_reaches_the_configuration() -> None:
    options: dict[str, Any] = {"score": "l2", "rho": 2, "eta": 7, "k": 3, "threads": 2, "cov": 1.0, "monitor": "map@5"}
    options |= {"negatives": "sampled", "objective": "softmax", "batch_size": 512, "interaction_weight_cap": 2.0}
    alone = {"popularity": 0.4}  # does not go with l2, which cov needs
    for field in dataclasses.fields(TrainConfig):
        if field.name not in options | alone:
            options[field.name] = choices(field)[-1] if choices(field) else 2 * (field.default or 0) or 1  # type: ignore[operator]
    assert DRM(**options).config == TrainConfig(**options)
    assert DRM(**options).config.changed() == {k: v for k, v in options.items() if k != "objective"}  # the default
    assert DRM(**alone).config.changed() == alone


def test_help_lists_each_parameter_with_default_and_meaning() -> None:
    renderer = pydoc.plaintext  # type: ignore[attr-defined]
    text = plain(pydoc.render_doc(DRM, renderer=renderer).replace("|", " "))
    for field in dataclasses.fields(TrainConfig):
        declared = declaration(field)
        kind = "{" + ", ".join(f'"{value}"' for value in choices(field)) + "}" if choices(field) else "[a-z]+"
        default = f'"{field.default}"' if isinstance(field.default, str) else f"{field.default}"
        given = ", optional" if field.default is None else f", default {default}"
        unset = f" Default: {declared.unset}." if declared.unset else ""
        kind = re.escape(kind) if choices(field) else kind
        assert re.search(rf"\b{field.name} : {kind}{re.escape(given)} {re.escape(declared.help + unset)}", text), (
            field.name
        )


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(DRM()) == repr(DRM(factors=64)) == "DRM()"
    assert repr(DRM(factors=32)) == repr(DRM(TrainConfig(factors=32))) == "DRM(factors=32)"
    assert repr(DRM(lam=3, score="l2")) == "DRM(score='l2', lam=3.0)"
    assert eval(repr(DRM(eta=5, seed=1))).config == TrainConfig(eta=5, seed=1)
    assert repr(DRM(TrainConfig(rho=4).resolved())) == "DRM(rho=4)"  # as a saved model comes back
    assert repr(DRM(TrainConfig(rho=4, eta=45, k=2).resolved())) == "DRM(rho=4, eta=45, k=2)"


def test_resume_needs_a_run() -> None:
    with pytest.raises(InputError, match="`resume` needs `run`"):
        DRM().fit(Dataset.from_csr(([0, 1], [0]), n_items=2), resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_": 3}, "DRM: unknown option `lambda_`; did you mean `lam`?"),
        ({"Lambda": 3}, "DRM: unknown option `Lambda`; did you mean `lam`?"),
        ({"facters": 3}, "DRM: unknown option `facters`; did you mean `factors`?"),
        ({"learning_rate": 3}, "DRM: unknown option `learning_rate`; the options are score, factors, "),
        ({"config": TrainConfig(), "factors": 64}, "DRM: give a TrainConfig or options as keywords, not both"),
        ({"config": "l2"}, "DRM: `config` must be a TrainConfig, got 'l2'; give options as keywords"),
        ({"factors": "many"}, "`factors` must be int, got 'many'"),
        ({"lam": 1, "lambda": 2}, "DRM: 'lam' and 'lambda' are the same option; give only one of them"),
    ],
)
def test_wrong_keywords_are_answered_with_those_that_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        DRM(**options)


def test_a_stored_configuration_can_be_given_as_keywords() -> None:
    config = TrainConfig(lam=3.0, factors=8)
    assert "lambda" in config.to_dict()
    assert DRM(**config.to_dict()).config == config


def test_a_resumed_run_names_options_as_python_does(tmp_path: Path) -> None:
    data = Dataset.from_csr(([0, 1, 2], [0, 1]), n_items=20)
    DRM(factors=2, epochs=1).fit(data, run=tmp_path / "run")
    with pytest.raises(InputError, match=r"a resumed run cannot change `factors`, `lam`, only `backend`, `epochs`"):
        DRM(factors=3, lam=3, epochs=1).fit(data, run=tmp_path / "run", resume=True)


def test_the_threads_of_one_model_are_not_those_of_the_next(threads: None) -> None:
    def in_use() -> tuple[int, int]:
        return n_threads(), torch.get_num_threads()

    DRM(backend="cpu").backend()
    set_threads(2)
    torch.set_num_threads(2)
    every = in_use()
    one, any_number = DRM(threads=1, backend="cpu"), DRM(backend="cpu")
    for _ in range(2):
        one.backend()
        one.backend()
        assert in_use() == (1, 1)
        any_number.backend()
        assert in_use() == every
    torch.set_num_threads(1)  # the program's own choice stays
    any_number.backend()
    assert in_use() == (every[0], 1)


def test_fit_takes_frames_and_matrices_and_learns_from_all_of_them() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pl.DataFrame({"user": ["a", "a", "b", "b"], "item": ["x", "y", "x", "z"]})
    model = DRM(factors=2, epochs=1).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    for given in (frame, frame.lazy(), pandas.DataFrame(frame.to_dict(as_series=False))):
        other = DRM(factors=2, epochs=1).fit(given)
        assert torch.equal(other.item_factors, model.item_factors)
        assert other.interactions.user_ids.to_list() == ["a", "b"]
    matrix = model.interactions.train.to_scipy()
    for sparse in (matrix, matrix.tocoo(), matrix.tocsc()):
        assert torch.equal(DRM(factors=2, epochs=1).fit(sparse).item_factors, model.item_factors)
    with pytest.raises(InputError, match=r"a polars or pandas frame, or a scipy sparse matrix, not list"):
        DRM(factors=2).fit([1, 2])
    with pytest.raises(InputError, match=r"no column that is recognised.*parameters of `Dataset.from_frame`"):
        DRM(factors=2).fit(pl.DataFrame({"a": [1], "b": [2]}))


def test_entries_of_a_matrix_that_are_no_positives() -> None:
    matrix = csr_matrix(np.array([[1.0, 2.0, -1.0], [3.0, 0.0, 1.0]]))
    with pytest.warns(UserWarning, match="1 of 5 entries of the matrix are 0 or less and are left out"):
        model = DRM(factors=2, epochs=1).fit(matrix)
    assert model.interactions.train.nnz == 4
    assert matrix.nnz == 5  # the caller's matrix stays as it is
    matrix.data[0] = np.nan
    with pytest.raises(InputError, match="1 entries that are NaN"):
        DRM(factors=2, epochs=1).fit(matrix)


def test_weights_of_frames_and_matrices_are_used_if_asked_for() -> None:
    frame = pl.DataFrame({"user": ["a", "a", "b", "b"], "item": ["x", "y", "x", "z"], "weight": [1.0, 9.0, 2.0, 3.0]})
    options: dict[str, Any] = {"factors": 2, "epochs": 3, "interaction_weights": "raw", "lr": 0.5}
    data = Dataset.from_frame(frame, ratios=(1, 0, 0), weight="weight")
    model = DRM(**options).fit(data)
    assert torch.equal(DRM(**options).fit(frame).item_factors, model.item_factors)
    matrix = data.train.to_scipy()
    matrix.data[:] = data.train.weights
    assert torch.equal(DRM(**options).fit(matrix).item_factors, model.item_factors)
    plain = DRM(**{**options, "interaction_weights": "off"}).fit(frame)
    assert not torch.equal(plain.item_factors, model.item_factors)
    with pytest.raises(InputError, match=r"keeps no weights.*`dataset`"):
        model.refit()


def test_frames_are_histories() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pl.DataFrame({"user": ["a", "a", "b", "b"], "item": ["x", "y", "x", "z"]})
    model = DRM(factors=2, epochs=1).fit(frame)
    history = {"user": ["new", "new"], "item": ["x", "y"]}
    ours = model.recommend_from(pl.DataFrame(history), k=1)
    found: Any = model.recommend_from(pandas.DataFrame(history), k=1)
    assert isinstance(found, pandas.DataFrame)  # pandas in, pandas out
    assert list(found.itertuples(index=False, name=None)) == ours.rows()
    assert isinstance(model.recommend(pandas.Series(["a"]), k=1), pandas.DataFrame)
    assert isinstance(model.recommend(["a"], k=1), pl.DataFrame)
    fitted = DRM(factors=2, epochs=1).fit(pandas.DataFrame(frame.to_dict(as_series=False)))
    assert isinstance(fitted.recommend(), pandas.DataFrame)
    popular: Any = fitted.recommend(["z"], k=1, unknown="popular")
    assert popular["score"].isna().all()
    assert isinstance(fitted.similar_items(["x"], k=1), pandas.DataFrame)


def test_results_are_pandas_frames_if_the_model_last_learned_from_one(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    ours = pl.DataFrame({"user": ["a", "a", "b", "b"], "item": ["x", "y", "x", "z"]})
    theirs = pandas.DataFrame(ours.to_dict(as_series=False))

    def gives_pandas(model: DRM) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeldOutWarning)
            return isinstance(model.recommend(["a"]), pandas.DataFrame)

    assert gives_pandas(DRM(factors=2, epochs=1).fit(theirs, run=tmp_path / "run"))
    model = DRM(factors=2, epochs=1).fit(Dataset.from_frame(theirs, ratios=(0.5, 0.25, 0.25)))
    assert gives_pandas(model)
    assert gives_pandas(model.refit())
    attributes = pl.DataFrame({"item": ["x"], "price": [1]})
    assert gives_pandas(DRM(factors=2, epochs=1).fit(Dataset.from_frame(theirs).with_attributes(attributes)))
    model.save(tmp_path / "model")
    model = DRM.load(tmp_path / "model")
    assert not gives_pandas(model)
    assert gives_pandas(model.partial_fit(theirs))
    assert gives_pandas(model.partial_fit(Dataset.from_frame(theirs.head(1), ratios=(1, 0, 0))))
    assert not gives_pandas(model.partial_fit(ours))
