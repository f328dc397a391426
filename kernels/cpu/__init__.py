"""The operations for the CPU: Numba, threads, one file per operation. See `drm_triton.kernels.protocol`."""

from drm_triton.kernels.cpu.catalogue import catalogue_gradients
from drm_triton.kernels.cpu.gradients import list_gradients
from drm_triton.kernels.cpu.sampling import sample_lists, sample_users
from drm_triton.kernels.cpu.softsort import drm_lists, soft_topk_backward, soft_topk_forward
from drm_triton.kernels.cpu.terms import list_terms
from drm_triton.kernels.cpu.topk import pack_items, top_k
from drm_triton.kernels.cpu.update import merge_shared, update_rows
from drm_triton.names import BackendName

__all__ = [
    "catalogue_gradients",
    "drm_lists",
    "list_gradients",
    "list_terms",
    "merge_shared",
    "name",
    "pack_items",
    "sample_lists",
    "sample_users",
    "soft_topk_backward",
    "soft_topk_forward",
    "top_k",
    "update_rows",
]

name: BackendName = "cpu"
