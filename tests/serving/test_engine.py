"""The engine in process: requests that wait at the same time share a batch."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from drm_triton.kernels import get_backend
from drm_triton.ranking.topk import TopKIndex
from drm_triton.serving.engine import MAX_BATCH, NO_ITEMS, MicroBatcher, TopKRequest, search_batch, unknown_id_error


def test_waiting_requests_share_a_batch() -> None:
    batches: list[list[int]] = []

    def negate(requests: list[int]) -> list[int]:
        batches.append(requests)
        if 13 in requests:
            raise ValueError("thirteen")
        return [-request for request in requests]

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            batcher: MicroBatcher[int, int] = MicroBatcher(negate, pool)
            assert await asyncio.gather(*map(batcher.submit, range(10))) == [-i for i in range(10)]
            assert batches == [list(range(10))]
            cancelled = asyncio.create_task(batcher.submit(10))
            others = [asyncio.create_task(batcher.submit(i)) for i in (11, 12)]
            await asyncio.sleep(0)
            cancelled.cancel()
            assert await asyncio.gather(*others) == [-11, -12]
            failed = await asyncio.gather(*map(batcher.submit, (13, 14)), return_exceptions=True)
            assert [str(error) for error in failed] == ["thirteen"] * 2
            assert await batcher.submit(15) == -15
            assert await asyncio.gather(*map(batcher.submit, range(100, 200))) == [-i for i in range(100, 200)]
            assert [len(batch) for batch in batches[-2:]] == [MAX_BATCH, 100 - MAX_BATCH]

    asyncio.run(run())


def test_each_result_of_a_batch_has_its_own_k() -> None:
    vectors = torch.eye(4)
    index = TopKIndex(get_backend("cpu"), vectors, "dot")
    requests = [
        TopKRequest(vectors[2], NO_ITEMS, 1),
        TopKRequest(vectors[2], np.array([0, 2], dtype=np.int32), 100),
        TopKRequest(vectors[1], np.arange(4, dtype=np.int32), 3),
    ]
    results = search_batch(index, requests)
    assert [result.codes for result in results] == [[2], [1, 3], []]
    assert [result.scores for result in results] == [[1.0], [0.0, 0.0], []]


def test_an_unknown_id_is_named_briefly() -> None:
    assert str(unknown_id_error("user", ["x" * 1000])).startswith("unknown user id: 'xxx")
    assert len(str(unknown_id_error("user", ["x" * 1000]))) < 120
    assert str(unknown_id_error("item", list(range(9)))) == "unknown item ids: 0, 1, 2, 3, 4 and 4 more"
