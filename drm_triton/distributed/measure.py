"""What each rank has measured of its users, brought together on all of them."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch

from drm_triton.distributed.world import World
from drm_triton.ranking.evaluate import Measured


def gather_measured(world: World, own: Measured) -> list[Measured]:
    """Return what every rank has measured, in the order of the ranks, which is that of the users."""
    columns = own.per_user.columns
    numbers = np.ascontiguousarray(own.per_user.to_numpy().astype(np.float64))  # counts of users are exact, too
    words = torch.from_numpy(numbers).view(torch.int32).to(world.device)  # [users, 2 * columns]
    tables = [part[0].cpu().contiguous().view(torch.float64).numpy() for part in world.exchange([[words]] * world.size)]
    exposures = world.gather(torch.from_numpy(np.stack([*own.exposure.values()])).to(world.device))
    return [
        Measured(
            pl.DataFrame(table, columns, orient="row").cast(own.per_user.schema),
            dict(zip(own.exposure, exposure.cpu().numpy(), strict=True)),
            left_out,
            own.beyond_accuracy,
        )
        for table, exposure, left_out in zip(tables, exposures, world.gather_objects(own.left_out), strict=True)
    ]
