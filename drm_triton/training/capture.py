"""A training step on a GPU as one CUDA graph: the host launches it with one call.

This is in place of 16 launches of Triton kernels and 52 operations of torch, for lists of up to 128 items.
Everything that differs from step to step is on the GPU: the epoch and the position in it, from which the lists are
drawn and the learning rate follows, the number of the step, which keys the rounding to bfloat16, the factors, and the
losses. The step itself moves position and number on. So its launches are the same for every step, and can be recorded
once and replayed.
"""

import os

import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.kernels.catalogue import CataloguePlan
from drm_triton.kernels.precision import arithmetic
from drm_triton.kernels.protocol import Backend, ListPlan, Objective
from drm_triton.kernels.weights import training_rank_weights
from drm_triton.training.state import State
from drm_triton.training.step import rate_at, train_step

EAGER_STEPS = 3  # before the capture: they compile the kernels and let torch create its work spaces


class DeviceStep:
    """A step on the next `batch_size` lists, whose epoch, position, rate and number are on the device."""

    def __init__(
        self, state: State, plan: ListPlan, config: TrainConfig, objective: Objective, backend: Backend
    ) -> None:
        from drm_triton.kernels.gpu import sampling

        self.state, self.plan, self.config, self.objective, self.backend = state, plan, config, objective, backend
        self.sampling = sampling
        self.clock = torch.empty(3, dtype=torch.int64, device=state.U.device)  # epoch, position, number of the step
        self.advance = torch.tensor([config.batch_in_force, 1], device=state.U.device)  # by which the last two move on
        self.set_clock()

    def set_clock(self) -> None:
        """Set the clock to the state."""
        for place, value in enumerate((self.state.epoch, self.state.position, self.state.step)):
            self.clock[place].fill_(value)

    def run(self) -> None:
        """Take the step, and move the clock on."""
        config, plan = self.config, self.plan
        epoch, position, _ = self.clock.double()
        lr = rate_at(config, epoch, position, plan.n_lists, self.state.first_epoch)
        batch = self.sampling.sample_at(plan, self.clock, config.batch_in_force)
        weights = plan.list_weights(batch)
        train_step(self.state, batch, config, self.objective, self.backend, lr, weights, self.clock[2])
        self.clock[1:] += self.advance


class CapturedStep:
    """Runs a `DeviceStep`: the first times as it is, then as a graph."""

    def __init__(self, step: DeviceStep) -> None:
        self.step, self.eager_steps = step, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rank_weights: Tensor | None = None  # of the graph, which has their address; their cache may drop them
        self.expected = (-1, -1, -1)  # what the clock will be

    def __call__(self) -> None:
        """Take a step on the lists from `state.position` on."""
        state, config = self.step.state, self.step.config
        if (state.epoch, state.position, state.step) != self.expected:
            self.step.set_clock()
        if self.graph is None and self.eager_steps < EAGER_STEPS:
            self.eager_steps += 1
            self.step.run()
        else:
            number = state.step
            if self.graph is None:
                self.graph = self._capture()
            self.graph.replay()
            state.step = number + 1
        state.position += config.batch_in_force
        self.expected = state.epoch, state.position, state.step

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record the launches of a step. Nothing runs."""
        device, dtype = self.step.clock.device, arithmetic(self.step.state.U.dtype)
        self.rank_weights = training_rank_weights(self.step.objective, dtype, device)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)  # by default, torch would use that of the first capture, whatever its device
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
            self.step.run()
        return graph


def captured_step(
    state: State, plan: ListPlan | CataloguePlan, config: TrainConfig, objective: Objective, backend: Backend
) -> CapturedStep | None:
    """Return a step that is captured, or None if the training cannot be: on the CPU, and if steps differ in shape.

    The whole catalogue as negatives has batches of different sizes, and covariance regularisation steps of two kinds.
    The environment variable DRM_CUDA_GRAPH=0 turns captures off.
    """
    if state.U.device.type != "cuda" or os.environ.get("DRM_CUDA_GRAPH") == "0":
        return None
    if not isinstance(plan, ListPlan) or config.cov != 0:
        return None
    return CapturedStep(DeviceStep(state, plan, config, objective, backend))
