"""Training on several ranks: the same bits for any number of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.distributed import engine
from drm_triton.distributed.engine import Distributed
from drm_triton.distributed.rows import Division
from drm_triton.distributed.world import World
from drm_triton.kernels import get_backend
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import initial_state, train
from drm_triton.training.state import TENSORS, State
from tests.distributed.thread_world import run_ranks

N_USERS, N_ITEMS = 150, 90
CPU = torch.device("cpu")


def dataset(weighted: bool = False) -> Dataset:
    rng = np.random.default_rng(3)
    mask = rng.random((N_USERS, N_ITEMS)) < np.linspace(0.02, 0.25, N_ITEMS)
    mask[7], mask[11] = False, True  # a user without items, and one with all
    whole = CSR.from_mask(mask)
    held_out = CSR.from_mask(mask & (rng.random(mask.shape) < 0.2) & (np.arange(N_USERS) != 11)[:, None])
    keys = np.setdiff1d(whole.keys(), held_out.keys())
    parts = [CSR.from_keys(keys, whole.shape), held_out, CSR.empty(whole.shape)]
    if weighted:
        parts = [replace(part, weights=(1 + rng.random(part.nnz)).astype(np.float32)) for part in parts]
    return Dataset(*parts, *ids())


def ids() -> tuple:
    import polars as pl

    return pl.DataFrame({"id": np.arange(N_USERS)}), pl.DataFrame({"id": np.arange(N_ITEMS)})


def shard(state: State, world: World) -> tuple[State, Division, Division]:
    users, items = Division(N_USERS, world.size), Division(N_ITEMS, world.size)
    rows = {"U": users, "U_state": users, "V": items, "V_state": items}
    parts = {name: getattr(state, name)[rows[name].rows(world.rank)].clone() for name in TENSORS.values()}
    return State(**parts), users, items


def trained(config: TrainConfig, data: Dataset, size: int, backend: str = "cpu", steps: int = 10**6) -> State:
    """Return the state after a training on some ranks, put together."""
    start = initial_state(config, data.train, CPU)

    def rank(world: World) -> State:
        state, users, items = shard(start, world)
        several = Distributed(world, state, users, items, config, data, data.train, get_backend(backend))
        return train(state, config, data, several, on_batch=lambda state, n_lists: state.step >= steps)

    states = run_ranks(size, rank)
    assert len({str(state.counters() | {"seconds": 0}) for state in states}) == 1
    whole = {name: torch.cat([getattr(state, name) for state in states]) for name in TENSORS.values()}
    return State(**whole, **states[0].counters())


def equal(a: State, b: State) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS.values())


SAMPLED = [
    {"objective": "hinge+drm", "score": "dot"},
    {"objective": "hinge+drm", "score": "l2"},
    {"objective": "hinge+drm", "score": "cosine", "share": 1},
    {"objective": "drm", "score": "dot", "rho": 3, "weight": "ndcg"},
    {"objective": "hinge", "score": "l2", "user_sampling": "uniform"},
    {"objective": "softmax", "negatives": "sampled"},
    {"objective": "psl", "eta": 20},
    {"objective": "bpr", "share": 48, "batch_size": 96},
    {"objective": "mse+drm", "eta": 70},
    {"objective": "hinge+drm", "eta": 200, "share": 128, "batch_size": 256},
    {"objective": "hinge+drm", "eta": 70, "share": 300, "batch_size": 600},  # a group is several tiles
    {"objective": "hinge+drm", "precision": "bfloat16"},
    {"objective": "hinge+drm", "interaction_weights": "raw"},
]
OTHERS = [
    {"objective": "softmax"},
    {"objective": "softmax", "score": "l2"},
    {"objective": "softmax", "score": "dot", "pool": 30},
    {"objective": "softmax", "popularity": 0.4, "pool": 30},
    {"objective": "softmax@k", "k": 5, "tau": 0.1},
    {"objective": "softmax@k", "k": 5, "pool": 20, "interaction_weights": "log", "precision": "bfloat16"},
    {"objective": "hinge+drm", "score": "l2", "cov": 1.0, "cov_every": 3},
    {"objective": "softmax", "score": "l2", "cov": 0.5, "cov_every": 2, "cov_form": "printed"},
]
name: Callable[[dict], str] = lambda options: "-".join(map(str, options.values()))  # noqa: E731


def config_of(options: dict, **others: object) -> TrainConfig:
    batch = {} if "batch_size" in options else {"batch_size": 192 if options in SAMPLED else 96}
    return TrainConfig(factors=12, epochs=2, eval_every=0, **batch, **options, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [*SAMPLED, *OTHERS], ids=name)
def test_any_number_of_ranks_gives_the_same_bits(options: dict) -> None:
    config, data = config_of(options), dataset("interaction_weights" in options)
    one = trained(config, data, 1)
    assert one.step > 2
    for size in (2, 3, 4):
        several = trained(config, data, size)
        assert equal(one, several), size
        assert one.sums == several.sums


@pytest.mark.parametrize("options", SAMPLED, ids=name)
def test_sampled_lists_give_the_bits_of_a_single_process(options: dict) -> None:
    config, data = config_of(options), dataset("interaction_weights" in options)
    state = initial_state(config, data.train, CPU)
    train(state, config, data, SingleProcess(state, config, data, data.train, get_backend("cpu")))
    assert equal(state, trained(config, data, 3))


@pytest.mark.parametrize("options", OTHERS, ids=name)
def test_other_objectives_agree_with_a_single_process_to_rounding(options: dict) -> None:
    config, data = config_of(options | {"precision": "float32"}), dataset("interaction_weights" in options)
    state = initial_state(config, data.train, CPU)
    alone = SingleProcess(state, config, data, data.train, get_backend("cpu"))
    train(state, config, data, alone, on_batch=lambda state, n_lists: state.step >= 2)
    several = trained(config, data, 3, steps=1)  # ranks stop one step after the wish
    assert several.step == state.step == 2
    for table in TENSORS.values():
        torch.testing.assert_close(getattr(several, table), getattr(state, table), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("options", [SAMPLED[0], SAMPLED[1], SAMPLED[5], *OTHERS[:3], OTHERS[6]], ids=name)
def test_the_reference_gives_the_same_bits_too(options: dict) -> None:
    config, data = config_of(options, backend="reference"), dataset()
    one = trained(config, data, 1, "reference", steps=3)
    for size in (2, 3, 4):
        assert equal(one, trained(config, data, size, "reference", steps=3)), size


def test_more_ranks_than_units_and_rows() -> None:
    config, data = config_of({"objective": "hinge+drm", "batch_size": 32}), dataset()
    assert equal(trained(config, data, 1, steps=3), trained(config, data, 7, steps=3))


@pytest.mark.parametrize("options", [SAMPLED[0], SAMPLED[2], SAMPLED[3], SAMPLED[4], OTHERS[0], OTHERS[3]], ids=name)
def test_a_rank_that_reads_only_its_users_draws_the_same_lists(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config, data = config_of(options), dataset()
    whole = trained(config, data, 2, steps=4)
    monkeypatch.setattr(engine, "WHOLE_INTERACTIONS", 0)
    for size in (1, 2, 3):
        assert equal(whole, trained(config, data, size, steps=4)), size


def test_validation_gives_the_metrics_of_a_single_process() -> None:
    config, data = replace(config_of(SAMPLED[0]), eval_every=1), dataset()
    state = initial_state(config, data.train, CPU)
    records: list = []
    alone = SingleProcess(state, config, data, data.train, get_backend("cpu"))
    train(state, config, data, alone, [lambda end: records.append(end.record)])
    found: list = []

    def rank(world: World) -> None:
        own, users, items = shard(initial_state(config, data.train, CPU), world)
        several = Distributed(world, own, users, items, config, data, data.train, get_backend("cpu"))
        train(own, config, data, several, [lambda end: found.append(end.record)] if world.first else [])

    run_ranks(3, rank)
    metrics = [{name: value for name, value in record.items() if "@" in name} for record in (*records, *found)]
    assert metrics[:2] == metrics[2:]
    assert metrics[0]["valid/ndcg@10"] > 0
