"""`DRM` as Python sees it: its threads, and what `fit` takes."""

import polars as pl
import pytest
import torch

from drm_triton import DRM, Dataset
from drm_triton.errors import InputError
from drm_triton.kernels.cpu.runtime.threads import n_threads, set_threads


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


def test_frames_are_taken_where_they_fit_and_named_where_not() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pl.DataFrame({"user": ["a", "a", "b", "b"], "item": ["x", "y", "x", "z"]})
    with pytest.raises(InputError, match=r"DRM.fit takes a Dataset, not DataFrame; Dataset\.from_frame"):
        DRM(factors=2).fit(frame)  # type: ignore[arg-type]
    model = DRM(factors=2, epochs=1).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    history = {"user": ["new", "new"], "item": ["x", "y"]}
    ours = model.recommend_from(pl.DataFrame(history), k=1)
    assert model.recommend_from(pandas.DataFrame(history), k=1).equals(ours)
