"""The operations in Triton, for NVIDIA and AMD GPUs; on the CPU only under TRITON_INTERPRET=1, for tests."""

from drm_triton.kernels.catalogue import catalogue_gradients
from drm_triton.kernels.gpu.gradients import list_gradients, list_terms
from drm_triton.kernels.gpu.sampling import sample_lists
from drm_triton.kernels.gpu.softsort import drm_lists, soft_topk_backward, soft_topk_forward
from drm_triton.kernels.gpu.topk import pack_items, top_k
from drm_triton.kernels.gpu.update import merge_shared, update_rows
from drm_triton.kernels.gpu.users import sample_users
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

name: BackendName = "triton"
