"""Training steps on a GPU without waits of the host, shown in Triton's interpreter and with a driver that runs nothing.

The device of the interpreter is the CPU, where the trainer reads the loss in every step. The tests make it believe that
this would wait.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.errors import DrmError
from drm_triton.kernels import gpu
from drm_triton.kernels.precision import table_type
from drm_triton.kernels.weights import training_rank_weights
from drm_triton.training import capture, step
from drm_triton.training.capture import CapturedStep, DeviceStep, captured_step
from drm_triton.training.loop import initial_state
from drm_triton.training.state import LOSS_SUMS, State
from drm_triton.training.step import check_losses, learning_rate, objective_of, take_step, training_plan
from tests.fake_driver import Waits, observe

CPU = torch.device("cpu")
CONFIG = TrainConfig(objective="hinge+drm", factors=8, eta=7, share=4, batch_size=8, epochs=2, init="normal", lr=0.1)


@pytest.fixture
def fit() -> CSR:
    dense = torch.rand(12, 20, generator=torch.Generator().manual_seed(0)) < 0.3
    users, items = dense.numpy().nonzero()
    return CSR.from_pairs(users, items, (12, 20))


@pytest.fixture
def few(fit: CSR) -> CSR:
    """Return the interactions of the first users, for several epochs in the interpreter."""
    return CSR(fit.indptr[:5], fit.indices[: fit.indptr[4]], (4, 20))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "reads_at_once", lambda device: False)


def trained(fit: CSR, config: TrainConfig, on_device: bool, epochs: int = 1) -> tuple[State, CapturedStep]:
    """Train on the Triton backend, with device steps where the batch is whole."""
    state, plan = initial_state(config, fit, CPU), training_plan(config, fit, CPU)
    state = state.to(CPU, table_type(config.precision, gpu.name))
    objective = objective_of(config, fit.shape[1])
    captured = CapturedStep(DeviceStep(state, plan, config, objective, gpu))
    for epoch in range(epochs):
        state.epoch, state.position = epoch, 0
        while state.position < plan.n_lists:
            stop = min(state.position + config.batch_in_force, plan.n_lists)
            if on_device and stop - state.position == config.batch_in_force:
                captured()
            else:
                take_step(state, plan, stop, config, objective, gpu, learning_rate(state, config, plan.n_lists))
        check_losses(state, config)
    return state, captured


def assert_same_training(state: State, expected: State) -> None:
    for name in ("U", "V", "U_state", "V_state"):
        assert torch.equal(getattr(state, name), getattr(expected, name)), name
    assert state.sums == pytest.approx(expected.sums)
    assert (state.step, state.position) == (expected.step, expected.position)


class Graphs:
    """Takes the place of CUDA graphs.

    A step that is captured leaves the tensors as they are. A replay takes it with the numbers that the host had at the
    capture, whatever they are now, and on the same tensors. It changes no number of the host.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing, self.captures, self.replays = False, 0, 0
        self.streams: list[torch.device] = []  # of captures
        self.run = DeviceStep.run
        monkeypatch.setattr(DeviceStep, "run", lambda step: self.capture(step) if self.capturing else self.run(step))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def graph(self, graph: "Graphs", stream: torch.device) -> Iterator[None]:
        self.capturing = True
        self.streams.append(stream)
        yield
        self.capturing = False

    def capture(self, step: DeviceStep) -> None:
        self.captures += 1
        self.step, self.tensors, self.numbers = step, self.changed(step), self.of_host(step)
        before = [x.clone() for x in self.tensors]
        self.run(step)
        for x, old in zip(self.tensors, before, strict=True):
            x.copy_(old)

    def replay(self) -> None:
        self.replays += 1
        state, now = self.step.state, self.of_host(self.step)
        assert all(x is old for x, old in zip(self.changed(self.step), self.tensors, strict=True))
        state.epoch, state.position, state.step = self.numbers
        self.run(self.step)
        state.epoch, state.position, state.step = now

    @staticmethod
    def changed(step: DeviceStep) -> list[torch.Tensor]:
        state = step.state
        assert state.unread is not None
        return [state.U, state.V, state.U_state, state.V_state, state.unread, step.clock]

    @staticmethod
    def of_host(step: DeviceStep) -> tuple[int, int, int]:
        return step.state.epoch, step.state.position, step.state.step


@pytest.mark.parametrize(
    "options",
    [
        *[{}, {"precision": "bfloat16"}],
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ({"schedule": "constant"}, {"score": "l2", "share": 1})
        ),
    ],
)
def test_device_steps_have_the_bits_of_other_steps(
    few: CSR, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, **options)
    expected, _ = trained(few, config, on_device=False)
    monkeypatch.setattr(step, "reads_at_once", lambda device: False)
    monkeypatch.setattr(capture, "EAGER_STEPS", 1000)  # there is nothing to capture with
    state, _ = trained(few, config, on_device=True)
    assert_same_training(state, expected)
    assert state.step >= 3  # several whole batches, and a rest
    assert state.position % 8


@pytest.mark.parametrize("options", [{}, pytest.param({"precision": "bfloat16"}, marks=pytest.mark.slow)])
def test_replayed_steps_have_the_bits_of_other_steps(
    few: CSR, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, **options)
    expected, _ = trained(few, config, on_device=False, epochs=2)
    monkeypatch.setattr(step, "reads_at_once", lambda device: False)
    graphs = Graphs(monkeypatch)
    state, _ = trained(few, config, on_device=True, epochs=2)
    assert_same_training(state, expected)
    n_lists = training_plan(config, few, CPU).n_lists
    assert n_lists % 8  # an epoch ends with a batch that is not captured
    assert graphs.captures == 1
    assert graphs.replays == 2 * (n_lists // 8) - capture.EAGER_STEPS > 0
    assert graphs.streams == [CPU]


def test_a_graph_keeps_the_rank_weights(few: CSR, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Graphs(monkeypatch)
    monkeypatch.setattr(capture, "EAGER_STEPS", 1)
    _, captured = trained(few, CONFIG, on_device=True)
    weights = weakref.ref(training_rank_weights(objective_of(CONFIG, 20), torch.float32, CPU))
    training_rank_weights.cache_clear()
    gc.collect()
    assert captured.rank_weights is weights() is not None


def test_from_a_loss_that_is_not_finite_on_nothing_changes(fit: CSR, as_on_a_gpu: None) -> None:
    state, plan = initial_state(CONFIG, fit, CPU), training_plan(CONFIG, fit, CPU)
    state.V[3] = float("nan")
    U, V = state.U.clone(), state.V.clone()
    for number in range(2):
        take_step(state, plan, 8 * number + 8, CONFIG, objective_of(CONFIG, 20), gpu, 0.1)
    assert torch.equal(state.U, U)
    assert torch.equal(state.V.nan_to_num(), V.nan_to_num())
    assert torch.equal(state.U_state, torch.full_like(U, state.U_state[0, 0].item()))
    with pytest.raises(DrmError, match="the loss became nan in epoch 1, at most 64 steps before step 3"):
        check_losses(state, CONFIG)


def test_moving_a_state_reads_its_losses(fit: CSR, as_on_a_gpu: None) -> None:
    state, plan = initial_state(CONFIG, fit, CPU), training_plan(CONFIG, fit, CPU)
    take_step(state, plan, 8, CONFIG, objective_of(CONFIG, 20), gpu, 0.1)
    assert state.sums["loss"] == 0
    assert state.to(CPU).sums["loss"] > 0
    assert set(state.sums) == set(LOSS_SUMS)


def test_steps_on_the_cpu_are_not_captured(fit: CSR) -> None:
    state, plan = initial_state(CONFIG, fit, CPU), training_plan(CONFIG, fit, CPU)
    assert captured_step(state, plan, CONFIG, objective_of(CONFIG, 20), gpu) is None


HOST_WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default", "aten._unique2.default"}

LISTS = [
    {},
    {"score": "l2", "share": 1},
    {"eta": 200},
    {"precision": "bfloat16"},
    {"interaction_weights": "log"},
    {"objective": "hinge", "score": "l2", "cov": 0.1},  # steps with dense gradients, and without
]
CATALOGUE = [  # all 300 items, and a pool of them
    {"objective": "softmax"},
    {"objective": "softmax", "precision": "bfloat16"},
    {"objective": "softmax@k", "pool": 100, "precision": "bfloat16"},
]


@pytest.fixture(scope="module")
def all_recorded() -> list[dict[str, Any]]:
    return observe("steps", *((options,) for options in (*LISTS, *CATALOGUE)))


@pytest.fixture(scope="module", params=[*LISTS, *CATALOGUE], ids=str)
def recorded(request: pytest.FixtureRequest, all_recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a training does with a driver that compiles for sm_90 and launches nothing."""
    return all_recorded[[*LISTS, *CATALOGUE].index(request.param)]


def test_what_is_captured_is_the_same_in_every_step(recorded: dict[str, Any]) -> None:
    """All arguments by value are equal, so a step that is replayed is the next one."""
    if not recorded["device steps"]:
        pytest.skip("batches of the whole catalogue differ in shape and are not captured")
    first, second = recorded["device steps"]
    assert first["launches"] == second["launches"]
    assert len(first["launches"]) >= 4
    assert first["operations"] == second["operations"]


def test_the_host_waits_for_nothing_in_a_step(recorded: dict[str, Any]) -> None:
    for taken in (*recorded["device steps"], *recorded["host steps"]):
        assert taken["operations"]
        assert HOST_WAITS & set(taken["operations"]) == set()
        assert taken["waits"] == []


def test_launches_of_a_step_are_few(recorded: dict[str, Any]) -> None:
    """Kernels of Triton; torch adds its own, for running and other sums."""
    for taken in (*recorded["device steps"], *recorded["host steps"]):
        assert 2 <= len(taken["launches"]) <= (16 if recorded["n"] < 128 else 23)
    if recorded["n"] < 128 and recorded["device steps"] and not recorded["weighted"]:
        assert len(recorded["device steps"][0]["operations"]) <= 52  # what a graph saves, see docs/kernels.md
    weighting = 16 if recorded["weighted"] else 0  # looks up the weights of the positives
    for taken in recorded["host steps"]:
        assert len(taken["operations"]) <= (48 if recorded["n"] < 128 else 128) + weighting


def test_every_launch_selects_the_device_of_its_tensors(recorded: dict[str, Any]) -> None:
    assert recorded["host steps"][0]["launches"]
    assert recorded["unguarded"] == []


def test_nothing_is_compiled_after_the_warm_up(recorded: dict[str, Any]) -> None:
    assert recorded["compiled in warm-up"]
    assert recorded["compiled later"] == []


def test_waits_are_recognised() -> None:
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    waiting: dict[str, Callable[[], object]] = {
        "item": x[0].item,
        "nonzero": mask.nonzero,
        "equal": lambda: torch.equal(x, x),
        "unique": x.unique,
        "masked_select": lambda: x.masked_select(mask),
        "__getitem__": lambda: x[mask],
        "__setitem__": lambda: x.__setitem__((mask,), 0),
        "__bool__": lambda: not mask[0],
        "repeat_interleave": lambda: torch.repeat_interleave(mask.long()),
        "to": lambda: x.to("meta"),
        "tensor": lambda: torch.tensor([1.0]),
        "new_tensor": lambda: x.new_tensor([1.0]),
        "as_tensor": lambda: torch.as_tensor([1.0]),
        "copy_": lambda: x.copy_(mask),
        "cuda": x.cuda,
    }
    for name, run in waiting.items():
        with Waits() as waits, suppress(AssertionError, RuntimeError):  # there may be no GPU
            run()
        assert waits.names == [name]
    with Waits() as waits:
        x[mask.long()].double().where(x > 0, 1).to("meta", non_blocking=True)
        x[1:] = 0
        torch.as_tensor(x).copy_(mask, non_blocking=True)
        torch.repeat_interleave(mask.long(), output_size=2)
    assert waits.names == []
