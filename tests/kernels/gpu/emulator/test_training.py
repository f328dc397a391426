"""Training by the compiled kernels in the PTX emulator: steps against the reference, and whole ones against the CPU."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton import Dataset
from drm_triton.bench.ptx import emulated
from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.kernels import cpu, gpu, reference
from drm_triton.kernels.precision import table_type
from drm_triton.kernels.protocol import Backend
from drm_triton.training import loop
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import initial_state
from drm_triton.training.state import State
from drm_triton.training.step import learning_rate, objective_of, take_step, training_plan
from tests.kernels.gpu.conftest import generator
from tests.kernels.gpu.emulator.conftest import SEEDS

N_USERS, N_ITEMS, STEPS, BATCH = 20, 40, 3, 4


def interactions() -> CSR:
    """Return a random matrix in which each user has 3 to 12 items."""
    draw = generator("interactions")
    rows = [
        torch.randperm(N_ITEMS, generator=draw)[: int(torch.randint(3, 13, (), generator=draw))].sort().values
        for _ in range(N_USERS)
    ]
    indptr = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return CSR(indptr.numpy(), torch.cat(rows).int().numpy(), (N_USERS, N_ITEMS))


def take_steps(config: TrainConfig, fit: CSR, state: State, backend: Backend) -> State:
    """Take STEPS steps."""
    plan, objective = training_plan(config, fit, torch.device("cpu")), objective_of(config, N_ITEMS)
    for number in range(STEPS):
        take_step(state, plan, (number + 1) * BATCH, config, objective, backend, learning_rate(state, config, 100))
    return state


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "hinge+drm", "score": "dot", "rho": 2, "eta": 10, "share": 1},
        pytest.param(
            {"objective": "hinge+drm", "score": "l2", "rho": 3, "eta": 12, "share": 2, "cov": 0.1},
            marks=pytest.mark.slow,
        ),
        pytest.param({"objective": "softmax", "negatives": "sampled", "share": 4, "eta": 14}, marks=pytest.mark.slow),
    ],
)
def test_steps(options: dict[str, Any]) -> None:
    config = TrainConfig(factors=8, batch_size=BATCH, seed=3, lr=0.05, **options)
    fit = interactions()
    start = initial_state(config, fit, torch.device("cpu"))
    # From 0, the first step of Adagrad moves a factor by lr however small its gradient is. Rounding decides whither.
    for state in (start.U_state, start.V_state):
        state.fill_(0.1)
    exact = copy.deepcopy(start)
    for name in ("U", "V", "U_state", "V_state"):
        setattr(exact, name, getattr(exact, name).double())
    expected = take_steps(config, fit, exact, reference)
    with emulated() as emulation:
        trained = take_steps(config, fit, copy.deepcopy(start), gpu)
    for name in ("U", "V", "U_state", "V_state"):
        right = getattr(expected, name)
        assert (getattr(trained, name) - right).abs().max() <= 1e-4 * right.abs().max(), name
    assert trained.sums["loss"] == pytest.approx(expected.sums["loss"], rel=1e-5)
    assert not torch.equal(trained.V, start.V)
    assert emulation.statistics["_losses_kernel"].launches == STEPS
    assert emulation.statistics["_step_kernel"].launches == 2 * STEPS


def tiny_dataset() -> Dataset:
    """Return 9 users with 5 items to train on, enough to be measured, and another one for validation, of 12 items."""
    draw = generator("tiny")
    rows = torch.stack([torch.randperm(12, generator=draw)[:6] for _ in range(9)])
    train, valid = rows[:, :5].sort().values, rows[:, 5:]
    parts = [(torch.arange(10).numpy() * x.shape[1], x.flatten().numpy()) for x in (train, valid)]
    return Dataset.from_csr(parts[0], parts[1], n_items=12)


def train(config: TrainConfig, backend: Backend) -> tuple[State, list[dict[str, Any]]]:
    """Train on the tiny data set; return the state at the end and the record of each epoch."""
    data = tiny_dataset()
    state, records = initial_state(config, data.train, torch.device("cpu")), list[dict[str, Any]]()
    state = state.to(torch.device("cpu"), table_type(config.precision, backend.name))
    engine = SingleProcess(state, config, data, data.train, backend)
    loop.train(state, config, data, engine, [lambda end: records.append(end.record)])
    return state, records


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},  # the default, softmax over the whole catalogue
        pytest.param({"batch_size": 4, "pool": 5}, marks=pytest.mark.slow),
        pytest.param({"objective": "hinge+drm", "batch_size": 32, "share": 16, "eta": 5}, marks=pytest.mark.slow),
        pytest.param({"objective": "psl+drm", "batch_size": 20, "share": 4, "eta": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_whole_training_ends_where_it_does_on_the_cpu(options: dict[str, Any]) -> None:
    """Two epochs, with a shorter last batch, and validation by top K."""
    config = TrainConfig(factors=8, epochs=2, **options)
    expected, expected_records = train(config, cpu)
    with emulated() as emulation:
        trained, records = train(config, gpu)
    assert trained.step == expected.step >= 4
    assert {"_step_kernel", "_rank_kernel"} <= set(emulation.statistics)
    for name in ("U", "V", "U_state", "V_state"):
        right = getattr(expected, name)
        assert (getattr(trained, name) - right).abs().max() <= 1e-5 * right.abs().max(), name
    for record, right in zip(records, expected_records, strict=True):
        compared = [name for name in right if name == "loss" or name.startswith("valid/")]
        assert len(compared) > 5
        assert {name: record[name] for name in compared} == pytest.approx({name: right[name] for name in compared})


def test_a_whole_training_of_bfloat16() -> None:
    """It rounds with the same random bits in any order of warps and on the CPU.

    A factor that another order of summation moves past its random threshold is rounded to the next number.
    """
    config = TrainConfig(factors=8, epochs=2, batch_size=4, precision="bfloat16")
    expected, expected_records = train(config, cpu)
    runs = []
    for seed in SEEDS[:2]:
        with emulated(seed) as emulation:
            runs.append(train(config, gpu))
        assert {"_step_kernel", "_rank_kernel"} <= set(emulation.statistics)
    (trained, records), (again, _) = runs
    assert trained.step == expected.step >= 4
    for name in ("U", "V", "U_state", "V_state"):
        assert torch.equal(getattr(trained, name), getattr(again, name)), name
    for name in ("U", "V"):
        table, right = getattr(trained, name), getattr(expected, name)
        assert table.dtype == torch.bfloat16
        assert (table == right).double().mean() > 0.98, name
        assert (table - right).abs().max() <= 2.0**-7 * right.abs().max(), name
    for record, right in zip(records, expected_records, strict=True):
        assert record["loss"] == pytest.approx(right["loss"], rel=1e-3)
