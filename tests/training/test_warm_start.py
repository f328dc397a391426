"""Updates: what is taken over, how new rows begin, and that an update is a run like any other."""

import json
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from drm_triton import DRM, Dataset
from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.unite import united
from drm_triton.errors import InputError
from drm_triton.models import BPR, CML, EASE, IALS, WARP, WMF
from drm_triton.names import FitOn
from drm_triton.progress import Reporter
from drm_triton.recommender import Recommender
from drm_triton.training.checkpoint import FILE, read_tensors
from drm_triton.training.run import dataset_of, read_metrics
from drm_triton.training.state import State
from drm_triton.training.step import learning_rate
from drm_triton.training.warm_start import Known, update_epochs

pytestmark = pytest.mark.usefixtures("no_curves")

OPTIONS: dict[str, Any] = {"factors": 8, "epochs": 8, "batch_size": 32}


def groups() -> pl.DataFrame:
    """Return users who have items of their group only: 60 users, 40 items, 4 groups."""
    rng = np.random.default_rng(0)
    pairs = [(u, i) for u in range(60) for i in range(40) if u % 4 == i % 4 and rng.random() < 0.6]
    return pl.DataFrame({"user": [f"u{u:02}" for u, _ in pairs], "item": [f"i{i:02}" for _, i in pairs]})


OLD_ROWS = (pl.col("user") < "u56") & (pl.col("item") < "i36")


@pytest.fixture(scope="module")
def old() -> pl.DataFrame:
    return groups().filter(OLD_ROWS)


@pytest.fixture(scope="module")
def new(old: pl.DataFrame) -> pl.DataFrame:
    """Users u56 to u59 and items i36 to i39 are new, and a user `late` has new items only."""
    late = pl.DataFrame({"user": ["late", "late"], "item": ["i36", "i37"]})
    return pl.concat([groups().filter(~OLD_ROWS), late])


@pytest.fixture(scope="module")
def both(old: pl.DataFrame, new: pl.DataFrame) -> Dataset:
    """All interactions, with codes in another order than those of the old data."""
    data = Dataset.of(pl.concat([old, new]))
    users, items = data.user_ids.reverse(), data.item_ids.reverse()
    return Dataset.from_csr(data.train.to_scipy()[::-1, ::-1], user_ids=users, item_ids=items)


@pytest.fixture(scope="module")
def run(old: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "old"
    DRM(**OPTIONS).fit(old, run=path)
    return path


def pairs(matrix: CSR, data: Dataset) -> set[tuple[str, str]]:
    return {(data.user_ids[u], data.item_ids[i]) for u in range(data.n_users) for i in matrix.row(u).tolist()}


def start(model: Recommender[Any], data: Dataset) -> dict[str, torch.Tensor]:
    state = model.updated_state(model._training_tensors(), Known.of(model.interactions, data), data.train)
    assert state is not None
    return state.tensors()


def test_known_rows_keep_factors_and_adagrad_sums_whatever_their_codes(run: Path, both: Dataset) -> None:
    model, stored = DRM.load(run), read_tensors(run / "best" / FILE)[0]
    begun = start(model, both)
    kinds = (("user", both.user_ids, model.interactions.user_ids), ("item", both.item_ids, model.interactions.item_ids))
    for kind, ids, before in kinds:
        place = {name: code for code, name in enumerate(before)}
        known = [(code, place[name]) for code, name in enumerate(ids) if name in place]
        assert len(known) == len(before)
        ours, theirs = (list(codes) for codes in zip(*known, strict=True))
        assert ours != theirs
        for table in (f"{kind}_factors", f"{kind}_state"):
            assert torch.equal(begun[table][ours], stored[table][theirs])
        fresh = [code for code, name in enumerate(ids) if name not in place]
        assert (begun[f"{kind}_state"][fresh] == 1).all()
        assert (begun[f"{kind}_state"][ours] > 1).any()


def test_new_users_are_folded_in_and_new_items_fit_their_users(run: Path, both: Dataset, new: pl.DataFrame) -> None:
    model = DRM.load(run)
    begun = start(model, both)
    history = new.filter(pl.col("user") == "u57", pl.col("item") < "i36")
    assert torch.equal(begun["user_factors"][both.encode_users(["u57"])], model.fold_in(history))
    U, V = begun["user_factors"], begun["item_factors"]
    assert torch.allclose(U.norm(dim=1), torch.ones(len(U)), atol=1e-5)
    assert torch.allclose(V.norm(dim=1), torch.ones(len(V)), atol=1e-5)  # `late` and the new items too
    scores = U @ V.T
    group = [int(name[1:]) % 4 for name in both.user_ids if name != "late"]
    for item in ("i36", "i37", "i38", "i39"):
        column = scores[[code for code, name in enumerate(both.user_ids) if name != "late"], both.encode_items([item])]
        own = torch.tensor([g == int(item[1:]) % 4 for g in group])
        assert column[own].min() > column[~own].max()


def test_items_without_interactions_stay_at_zero(run: Path, both: Dataset) -> None:
    matrix, ids = both.train.to_scipy(), both.item_ids.to_list()
    matrix.resize(both.n_users, both.n_items + 1)
    data = Dataset.from_csr(matrix, user_ids=both.user_ids, item_ids=[*ids, "nobody has it"])
    assert not start(DRM.load(run), data)["item_factors"][-1].any()


def test_a_saved_model_starts_with_new_adagrad_sums_and_says_so(
    run: Path, both: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DRM.load(run).save(tmp_path / "saved")
    for source, said in ((run, False), (tmp_path / "saved", True)):
        model = DRM.load(source)
        begun = start(model, both)
        assert bool((begun["user_state"] == 1).all()) is said
        model.partial_fit(both, reporter=Reporter())
        assert ("the model has no Adagrad sums" in capsys.readouterr().err) is said


def test_sums_of_a_checkpoint_that_has_changed_are_not_used(run: Path, both: Dataset, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    model = DRM.load(copy)
    DRM(**OPTIONS, seed=1).fit(model.interactions, run=tmp_path / "other")
    (tmp_path / "other" / "best" / FILE).replace(copy / "best" / FILE)  # as a training replaces it
    begun = start(model, both)
    assert (begun["user_state"] == 1).all()
    assert torch.equal(begun["user_factors"][both.encode_users(["u07"])], model.user_factors[[7]])


def test_bfloat16_factors_begin_rounded(old: pl.DataFrame, both: Dataset) -> None:
    begun = start(DRM(**OPTIONS, precision="bfloat16").fit(old), both)
    for name in ("user_factors", "item_factors"):
        assert torch.equal(begun[name], begun[name].bfloat16().float())


def test_the_rate_falls_from_lr_to_zero_over_the_epochs_of_an_update() -> None:
    table, config = torch.zeros(1, 1), TrainConfig(epochs=20, lr=0.2)
    state = State(table, table, table, table, epoch=17, first_epoch=17)
    assert learning_rate(state, config, 100) == 0.2
    state.epoch, state.position = 19, 50
    assert learning_rate(state, config, 100) == pytest.approx(0.2 / 6)
    stopped = TrainConfig(epochs=40, lr=0.2, stop_after=20)
    assert learning_rate(state, stopped, 100) == pytest.approx(0.2 / 6)
    assert learning_rate(state, TrainConfig(lr=0.2, schedule="constant"), 100) == 0.2


def test_the_number_of_epochs() -> None:
    assert [update_epochs(TrainConfig(epochs=n), None) for n in (1, 10, 20, 100)] == [1, 2, 3, 15]
    assert update_epochs(TrainConfig(epochs=20, stop_after=2), None) == 2
    assert update_epochs(TrainConfig(epochs=20), 20) == 20
    for epochs in (0, 21):
        with pytest.raises(InputError, match="`epochs` of an update must be from 1 to 20"):
            update_epochs(TrainConfig(epochs=20), epochs)


def test_an_update_is_a_run_that_says_where_it_came_from(run: Path, both: Dataset, tmp_path: Path) -> None:
    model = DRM.load(run).partial_fit(both, epochs=3, run=tmp_path / "new")
    assert [record["epoch"] for record in read_metrics(tmp_path / "new")] == [6, 7, 8]
    assert (tmp_path / "new" / "config.toml").read_text() == (run / "config.toml").read_text()
    origin = json.loads((tmp_path / "new" / "env.json").read_text())["from"]
    assert origin == {
        "path": str(run / "best"),
        "users": {"known": 56, "new": 5},
        "items": {"known": 36, "new": 4},
        "start": "factors and Adagrad sums",
    }
    assert torch.equal(DRM.load(tmp_path / "new").user_factors, model.user_factors)
    again = model.partial_fit(both)  # an update of an update takes as many epochs
    assert again._epoch == 8


@pytest.mark.parametrize("options", [{}, {"objective": "hinge+drm"}, {"objective": "psl", "precision": "bfloat16"}])
def test_a_resumed_update_ends_with_the_same_bits(
    options: dict[str, Any], old: pl.DataFrame, both: Dataset, tmp_path: Path
) -> None:
    chosen = {**OPTIONS, **options}
    DRM(**chosen).fit(old, run=tmp_path / "old")
    whole, killed, stopped = (tmp_path / name for name in ("whole", "killed", "stopped"))
    DRM.load(tmp_path / "old").partial_fit(both, epochs=2, run=whole)

    def die(state: object, n_lists: int) -> bool:
        raise RuntimeError

    with pytest.raises(RuntimeError):  # before the first checkpoint of an epoch
        DRM.load(tmp_path / "old").partial_fit(both, epochs=2, run=killed, on_batch=die)
    DRM.load(tmp_path / "old").partial_fit(both, epochs=2, run=stopped, on_batch=lambda state, n: state.epoch == 7)
    shutil.rmtree(tmp_path / "old")  # a resumed update does not need it
    expected = read_tensors(whole / "last" / FILE)[0]
    for path in (killed, stopped):
        DRM(**chosen).fit(both, run=path, resume=True)
        found = read_tensors(path / "last" / FILE)[0]
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert [record["epoch"] for record in read_metrics(path)] == [7, 8]


def test_a_resumed_update_cannot_change_where_its_schedule_ends(run: Path, both: Dataset, tmp_path: Path) -> None:
    DRM.load(run).partial_fit(both, run=tmp_path / "new")
    with pytest.raises(InputError, match="a resumed update cannot change `stop_after`"):
        DRM(**OPTIONS, stop_after=7).fit(both, run=tmp_path / "new", resume=True)


def test_same_bits_for_any_number_of_threads(run: Path, both: Dataset) -> None:
    one, two = (DRM.load(run).set_params(threads=n).partial_fit(both) for n in (1, 2))
    assert torch.equal(one.user_factors, two.user_factors)
    assert torch.equal(one.item_factors, two.item_factors)


def test_a_frame_of_new_interactions_joins_those_of_the_model(old: pl.DataFrame, new: pl.DataFrame) -> None:
    data = Dataset.from_frame(old, ratios=(0.8, 0.1, 0.1))
    model = DRM(**OPTIONS).fit(data)
    repeated = pl.concat([new, old.head(3)])
    assert model.partial_fit(repeated) is model
    kept = model.interactions
    assert (kept.train.nnz, kept.valid.nnz, kept.test.nnz) == (len(old) + len(new), 0, 0)
    assert pairs(kept.train, kept) == set(pl.concat([old, new]).rows())
    best = model.recommend(k=5)
    assert set(best["user"]) == set(pl.concat([old, new])["user"])
    assert best.join(pl.concat([old, new]), on=["user", "item"], how="semi").is_empty()
    assert int(best.filter(pl.col("user") == "u58", pl.col("rank") == 1)["item"][0][1:]) % 4 == 58 % 4


def test_a_first_partial_fit_is_a_fit(old: pl.DataFrame) -> None:
    first, fitted = DRM(**OPTIONS).partial_fit(old), DRM(**OPTIONS).fit(old)
    assert torch.equal(first.item_factors, fitted.item_factors)


def test_a_data_set_of_new_interactions_joins_those_of_the_model(
    run: Path, old: pl.DataFrame, new: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Dataset.from_frame(new, ratios=(0.6, 0.2, 0.2))
    model = DRM.load(run).partial_fit(data, run=tmp_path / "new", reporter=Reporter())
    lost = set(old["user"]) - set(new["user"])
    assert f"{len(lost)} users and {len(old)} interactions of the old model are kept" in capsys.readouterr().err
    kept = model.interactions
    assert kept.train.nnz == data.train.nnz + len(old)
    assert (kept.valid.nnz, kept.test.nnz) == (data.valid.nnz, data.test.nnz)
    best, everything = model.recommend(k=5), pl.concat([old, new])
    assert set(best["user"]) == set(everything["user"])
    assert best.join(everything, on=["user", "item"], how="semi").is_empty()
    stored = dataset_of(tmp_path / "new")  # the run has its data set
    assert model.evaluate(stored, min_train=1).means
    assert DRM(**OPTIONS).fit(stored, run=tmp_path / "new", resume=True)._epoch == 8
    assert model.refit(stored).interactions.train.nnz == len(everything)


@pytest.mark.parametrize("fit_on", ["train", "train+valid", "all"])
def test_what_the_new_data_holds_out_is_not_trained_on(fit_on: FitOn, old: pl.DataFrame, tmp_path: Path) -> None:
    model = DRM(**OPTIONS, fit_on=fit_on).fit(Dataset.from_frame(old))
    data = Dataset.from_frame(old.head(100), seed=1)  # holds out pairs that the model has learned from
    with pytest.warns(UserWarning, match="metrics on test will be too good") if fit_on != "all" else nullcontext():
        both = model.partial_fit(data, run=tmp_path / "new").interactions
    held_out = [name for name in ("valid", "test") if name not in model.config.fit_parts]
    for name in held_out:
        found, expected = getattr(both, name), getattr(data, name)
        assert found.nnz == expected.nnz > 0
        assert pairs(found, both) == pairs(expected, data)
    assert both.train.nnz == len(old) - sum(getattr(data, name).nnz for name in held_out)
    assert model.was_fit_on(dataset_of(tmp_path / "new"))


def test_a_data_set_with_all_interactions_stays_as_it_is(run: Path, both: Dataset) -> None:
    assert DRM.load(run).with_kept(both) is both


def test_new_attributes_replace_old_ones() -> None:
    frame = pl.DataFrame({"user": ["ann", "ann", "bob"], "item": ["x", "y", "x"]})
    old = Dataset.of(frame).with_attributes(pl.DataFrame({"item": ["x", "y"], "price": [1, 2], "title": ["X", "Y"]}))
    more = pl.DataFrame({"item": ["x", "z"], "price": [5, 6], "colour": ["red", "blue"]})
    new = Dataset.of(pl.DataFrame({"user": ["bob"], "item": ["z"]})).with_attributes(more)
    assert united(old, new).items.select("id", "title", "price", "colour").rows() == [
        ("x", "X", 5, "red"),
        ("y", "Y", 2, None),
        ("z", None, 6, "blue"),
    ]
    with pytest.raises(InputError, match="the attributes of the items have other types than those of the model"):
        united(old, new.with_attributes(pl.DataFrame({"item": ["x"], "price": ["low|cheap"]})))


def test_ids_of_frames_and_matrices() -> None:
    numbers = Dataset.of(pl.DataFrame({"user": [1, 2], "item": [5, 6]}))
    both = united(numbers, Dataset.of(pl.DataFrame({"user": ["2", "3"], "item": ["5", "7"]})))
    assert (both.user_ids.to_list(), both.item_ids.to_list()) == ([1, 2, 3], [5, 6, 7])
    assert [both.train.row(u).tolist() for u in range(3)] == [[0], [0, 1], [2]]
    with pytest.raises(InputError, match=r"the user ids of the model are whole numbers, such as 1, .* such as 'ann'"):
        united(numbers, Dataset.of(pl.DataFrame({"user": ["ann"], "item": ["5"]})))
    items = numbers.items.with_columns(title=pl.lit("t"))
    titled = Dataset(numbers.train, numbers.valid, numbers.test, numbers.users, items)
    more = united(titled, Dataset.of(pl.DataFrame({"user": [1], "item": [8]})))
    assert more.items["title"].to_list() == ["t", "t", None]


def test_held_out_interactions_that_the_old_model_has_seen_are_reported(run: Path, both: Dataset) -> None:
    matrix, model = both.train.to_scipy(), DRM.load(run)
    old_pair = both.encode_users(["u00"])[0], both.encode_items([groups()["item"][0]])[0]
    new_pair = both.encode_users(["late"])[0], both.encode_items(["i36"])[0]
    for pairs, seen in (((old_pair, new_pair), True), ((new_pair,), False)):
        test = matrix.copy()
        test.data[:] = 0
        for pair in pairs:
            test[pair] = 1
        test.eliminate_zeros()
        train = matrix - test
        train.eliminate_zeros()
        data = Dataset.from_csr(train, test=test, user_ids=both.user_ids, item_ids=both.item_ids)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.partial_fit(data, epochs=1)
            model = DRM.load(run)
        found = [str(one.message) for one in caught if "the old model has learned from" in str(one.message)]
        assert [message.split(",")[0] for message in found] == (
            ["the old model has learned from 1 of the 2 interactions in the part test"] if seen else []
        )
        assert all("with `drm-triton prepare ... --split time` or" in message for message in found)


def test_what_cannot_be_updated(run: Path, both: Dataset, new: pl.DataFrame) -> None:
    strangers = Dataset.of(pl.DataFrame({"user": ["x", "y"], "item": ["v", "w"]}))
    with pytest.raises(
        InputError, match=r"no user and no item of the new data, .* such as 'x', not 'u00' and item ids"
    ):
        DRM.load(run).partial_fit(strangers)
    with pytest.raises(InputError, match="an update cannot change `factors`: the model has 8, not 4"):
        DRM.load(run).set_params(factors=4).partial_fit(both)
    with pytest.raises(InputError, match="partial_fit: a model keeps no weights of interactions; give a Dataset"):
        DRM.load(run).set_params(interaction_weights="log").partial_fit(new)
    matrix = both.train.to_scipy()[:10]
    few = Dataset.from_csr(matrix, user_ids=both.user_ids[:10], item_ids=both.item_ids, weighted=True)
    with pytest.raises(InputError, match="partial_fit: a model keeps no weights of interactions; give a Dataset"):
        DRM.load(run).set_params(interaction_weights="log").partial_fit(few)


@pytest.mark.parametrize("make", [IALS, WMF, BPR, WARP, CML])
def test_other_factor_models_start_from_their_factors(
    make: Any, old: pl.DataFrame, both: Dataset, tmp_path: Path
) -> None:
    epochs = 40  # BPR needs so many to learn this data
    model = make(factors=4, epochs=epochs, **({"lr": 0.2} if make is BPR else {})).fit(old, run=tmp_path / "old")
    before, begun = read_tensors(tmp_path / "old" / "best" / FILE)[0], start(model, both)
    assert begun.keys() == before.keys()
    for name, table in begun.items():
        ids, known = (
            (both.user_ids, model.interactions.user_ids)
            if name.startswith("user")
            else (both.item_ids, model.interactions.item_ids)
        )
        codes = [ids.to_list().index(one) for one in known]
        assert torch.equal(table[codes], before[name]), name
    folded = begun["user_factors"][both.encode_users(["u57"])]
    assert folded.any()
    model.partial_fit(both, run=tmp_path / "new")
    assert [record["epoch"] for record in read_metrics(tmp_path / "new")] == [35, 36, 37, 38, 39, 40]
    best = model.recommend(["u57", "u58"], k=1)
    assert [int(item[1:]) % 4 for item in best["item"]] == [1, 2]
    unchanged = start(model, both)  # nothing new: every row is known
    assert torch.equal(unchanged["user_factors"], model.tensors["user_factors"])


def test_a_model_without_factors_is_trained_anew(
    old: pl.DataFrame, both: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    model = EASE().fit(old).partial_fit(both, reporter=Reporter())
    assert "ease has no vectors to start from: it is trained anew" in capsys.readouterr().err
    anew = EASE().fit(both)
    assert all(torch.equal(model.tensors[name], anew.tensors[name]) for name in anew.tensors)
