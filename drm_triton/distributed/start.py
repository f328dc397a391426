"""The state of a rank before the first step: its rows of the initial factors."""

from __future__ import annotations

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.distributed.rows import Division
from drm_triton.distributed.spectral import spectral_rows
from drm_triton.distributed.world import World
from drm_triton.training.initialize import OVERSAMPLING, initial_factors, normal_rows
from drm_triton.training.loop import state_of
from drm_triton.training.state import TENSORS, State

# Bytes of the tables of a spectral start that every rank computes as a whole, as a single process does. Larger ones are
# divided. What a step costs does not depend on it.
WHOLE_START = 1 << 30


def held_rows(world: World, users: Division, items: Division) -> dict[str, slice]:
    """Return which rows of each tensor of a checkpoint this rank holds."""
    return {name: (users if name.startswith("user") else items).rows(world.rank) for name in TENSORS}


def initial_shard(world: World, config: TrainConfig, train: CSR, users: Division, items: Division) -> State:
    """Return the rows of this rank, the same with any number of ranks."""
    rows = users.rows(world.rank), items.rows(world.rank)
    accumulator = 0.0
    if config.init == "normal":
        U, V = normal_rows(config, train.shape, rows)
    elif 4 * sum(train.shape) * (config.factors + OVERSAMPLING) <= WHOLE_START:
        *tables, accumulator = initial_factors(config, train, world.device)
        U, V = (table[own].clone() for table, own in zip(tables, rows, strict=True))
    else:
        U, V = spectral_rows(world, train, users, items, config.factors, config.seed)
        accumulator = 1.0
    return state_of(config, U.to(world.device), V.to(world.device), accumulator)
