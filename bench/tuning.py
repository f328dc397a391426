"""Choose launch options for the kernels of a training step and of top-K on this GPU, for `bench kernels --tune`.

One option of one kernel is varied at a time, and an option is kept if the operation takes at least GAIN less time. The
options cannot change a bit of a result (`kernels/gpu/tuning.py`). This is verified here as well: values with which an
operation gives other bits are left out, with a message.
"""

from collections.abc import Callable

import torch

from drm_triton.bench.record import time_in_turns
from drm_triton.exercises import OPERATIONS, Case, Inputs, same_bits
from drm_triton.kernels.gpu import tuning
from drm_triton.kernels.gpu.tuning import Choices, knobs_of, using
from drm_triton.kernels.protocol import Backend

TUNED = ("sample_lists", "list_gradients", "update_rows", "top_k")
GAIN = 0.02


def timed(runner: Callable[[], object]) -> float:
    """Return the median seconds of a call."""
    return time_in_turns({"run": runner}, seconds=0.5, least=1)["run"]


def choose(
    backend: Backend, device: torch.device, case: Case, time: Callable[[Callable[[], object]], float]
) -> Choices:
    """Return the options that were faster than those of the launchers, by `tuning.key_of`."""
    kept: Choices = {}
    for name in TUNED:
        operation, drawn = OPERATIONS[name], Inputs.of(case)
        inputs = drawn.to(device, case.dtype)  # of the timed runs, which may change it
        with using({}) as kernels:
            expected = operation(backend, drawn.to(device, case.dtype))
        with using(kept):
            best = time(lambda operation=operation, inputs=inputs: operation(backend, inputs))  # type: ignore[misc]
        for key, (kernel, options) in kernels.items():
            for knob, values in knobs_of(kernel).items():
                for value in (value for value in values if value != options.get(knob)):
                    tried = kept | {key: kept.get(key, {}) | {knob: value}}
                    with using(tried):
                        results = operation(backend, drawn.to(device, case.dtype))
                        if not all(same_bits(results[output], expected[output]) for output in expected):
                            print(f"{key}: {knob} {value} changes the results and is left out")
                            continue
                        seconds = time(lambda operation=operation, inputs=inputs: operation(backend, inputs))  # type: ignore[misc]
                    if seconds < best * (1 - GAIN):
                        print(f"{key}: {knob} {value} takes {seconds / best:.2f} of the time of {name}")
                        kept, best = tried, seconds
    return kept


def tune(backend: Backend, device: torch.device, case: Case) -> Choices:
    """Choose options on the current GPU and store them."""
    choices = choose(backend, device, case, timed)
    file = tuning.store(tuning.gpu_of(torch.device("cuda", torch.cuda.current_device())), choices)
    print(f"{len(choices)} kernels have other options than before; written to {file}")
    return choices
