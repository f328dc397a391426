"""Strong simple models of the library with the signature of those in `peers`: fit(train, seed, threads, **options).

EASE and RP3beta return weights between items and have no randomness. iALS returns factors.
"""

from drm_triton.bench.peers import Factors
from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models import IALS
from drm_triton.models.ease import ease_weights
from drm_triton.models.rp3beta import rp3beta_weights
from drm_triton.ranking.item_index import ItemWeights


def ease(train: CSR, seed: int, threads: int, lam: float) -> ItemWeights:
    """Fit EASE."""
    set_threads(threads)
    return ease_weights(train, lam)


def rp3beta(train: CSR, seed: int, threads: int, alpha: float, beta: float, k: int, normalize: bool) -> ItemWeights:
    """Fit RP3beta."""
    set_threads(threads)
    return ItemWeights(sparse=rp3beta_weights(train, alpha, beta, k, normalize))


def ials(train: CSR, seed: int, threads: int, factors: int, alpha0: float, lam: float, epochs: int = 16) -> Factors:
    """Fit iALS by exact alternating steps."""
    model = IALS(
        factors=factors, unobserved_weight=alpha0, regularization=lam, block=factors, seed=seed, threads=threads
    )
    tensors = model.start(train)
    for epoch in range(epochs):
        model.epoch(tensors, train, epoch, lambda done, total: None)
    return model.factors(tensors)
