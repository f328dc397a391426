"""Tests of significance between two models. docs/comparing.md says what each of them tells.

Two kinds of data are tested:

- one value for each seed (`welch`): the models were trained several times, independently of each other;
- one value for each user (`paired_t`, `wilcoxon`, `bootstrap_interval`): both models ranked items for the same users,
  so that the values belong together in pairs.

All tests are two-sided. `holm` corrects the p-values of several tests. The results are pure functions of the arguments.
A value that is not finite raises an `InputError`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from drm_triton.errors import InputError
from drm_triton.names import MAX_SEED

LEVEL = 0.95  # of intervals
RESAMPLES = 10_000  # of the bootstrap
EXACT_UP_TO = 50  # differences; beyond, the p-values of Wilcoxon's test are from the normal distribution
SAME = 1e-12  # differences closer than this share of the largest value are tied: 2/3 - 1/3 is not 1/3 in float64
BLOCK = 64  # resamples whose counts are in memory at a time


class Significance(NamedTuple):
    """The result of a test: its statistic, positive if the first model is ahead, and the two-sided p-value."""

    statistic: float
    p: float


# -- seeds -------------------------------------------------------------------------------------------------------------


def welch(a: ArrayLike, b: ArrayLike) -> Significance | None:
    """Compare the means over seeds of two models with Welch's t-test.

    With the mean m, the variance s^2 (divisor n - 1) and the number n of the values of each model:

        e_a = s_a^2 / n_a,  e_b = s_b^2 / n_b
        t   = (m_a - m_b) / sqrt(e_a + e_b)
        df  = (e_a + e_b)^2 / (e_a^2 / (n_a - 1) + e_b^2 / (n_b - 1))

    and the p-value is P(|T| >= |t|) for Student's T with df degrees of freedom.

    The value of a model without randomness is exact: e = 0, and its term in df is 0. Against an exact value, this is
    the one-sample t-test with n - 1 degrees of freedom.

    Parameters
    ----------
    a, b : [n_a], [n_b], one value for each seed. A single value stands for a model without randomness; so do several
        values that are all equal.

    Returns
    -------
    Significance, or None if both values are exact: chance between seeds then plays no part, and there is no test.

    Examples
    --------
    >>> test = welch([1, 2, 3], [2, 4, 6])  # t = -2 / sqrt(1/3 + 4/3), df = 50 / 17
    >>> round(test.statistic, 6), round(test.p, 6)
    (-1.549193, 0.220881)
    >>> test = welch([1, 2, 3], [4])  # one sample: t = (2 - 4) / sqrt(1/3), df = 2
    >>> round(test.statistic, 6), round(test.p, 6)
    (-3.464102, 0.07418)
    >>> welch([0.31], [0.32]) is None
    True
    """
    x, y = _sample("welch", "a", a), _sample("welch", "b", b)
    e_x, e_y = _squared_error(x), _squared_error(y)
    if e_x + e_y == 0:
        return None
    spread = sum(e**2 / (len(values) - 1) for e, values in ((e_x, x), (e_y, y)) if e)
    return _student((x.mean() - y.mean()) / np.sqrt(e_x + e_y), (e_x + e_y) ** 2 / spread)


# -- users -------------------------------------------------------------------------------------------------------------


def paired_t(a: ArrayLike, b: ArrayLike) -> Significance:
    """Compare the means over users of two models with the paired t-test.

    With the mean m and the standard deviation s (divisor n - 1) of the differences d_u = a_u - b_u of n users:

        t = m / (s / sqrt(n)),  n - 1 degrees of freedom

    If all differences are 0, the statistic is 0 and the p-value is 1. If all are the same other value, the statistic is
    infinite and the p-value is 0.

    Parameters
    ----------
    a, b : [n], values of the same users in the same order; n >= 2

    Examples
    --------
    >>> test = paired_t([3, 5, 4, 6], [2, 3, 4, 5])  # d = 1, 2, 0, 1: t = 1 / (sqrt(2/3) / 2)
    >>> round(test.statistic, 6), round(test.p, 6)
    (2.44949, 0.091721)
    """
    d = _differences("paired_t", a, b)
    mean, error = d.mean(), np.sqrt(_squared_error(d))
    if error == 0:
        return Significance(float(np.inf * mean), 0.0) if mean else Significance(0.0, 1.0)
    return _student(mean / error, len(d) - 1)


def wilcoxon(a: ArrayLike, b: ArrayLike) -> Significance:
    """Test with Wilcoxon's signed ranks whether the differences of users are symmetric around 0.

    Users with d_u = a_u - b_u = 0 are left out, as Wilcoxon did (SciPy: `zero_method="wilcox"`). The others are ranked
    by |d_u|, with the mean rank for ties. The statistic is

        W = sum of sign(d_u) rank_u

    Without a difference between the models, each sign is + or - with probability 1/2. For up to 50 differences, the
    p-value is exact: P(|W| >= |w|) over all signs, with ties as they are. For more, z = W / sqrt(sum of rank_u^2) is
    compared with the normal distribution, without continuity correction.

    If all differences are 0, the statistic is 0 and the p-value is 1.

    Parameters
    ----------
    a, b : [n], values of the same users in the same order; n >= 2

    Examples
    --------
    >>> wilcoxon([3, 5, 4, 6], [2, 3, 4, 9])  # d = 1, 2, 0, -3: W = 1 + 2 - 3
    Significance(statistic=0.0, p=1.0)
    >>> wilcoxon([3, 5, 4, 6], [2, 3, 4, 3])  # d = 1, 2, 0, 3: W = 6, as large as in one of 8 choices of signs
    Significance(statistic=6.0, p=0.25)
    """
    from scipy.special import ndtr

    d = _differences("wilcoxon", a, b)
    largest = max(np.abs(np.asarray(values, dtype=np.float64)).max() for values in (a, b))
    d = np.rint(d / (SAME * largest)) if largest else d
    d = d[d != 0]
    if len(d) == 0:
        return Significance(0.0, 1.0)
    _, place, ties = np.unique(np.abs(d), return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(ties) - ties + 1)[place]  # twice the mean of the ranks that ties share: a whole number
    w = float((np.sign(d) * doubled).sum()) / 2
    if len(d) <= EXACT_UP_TO:
        return Significance(w, _exact_p(doubled, w))
    z = w / np.sqrt((doubled.astype(np.float64) ** 2).sum() / 4)
    return Significance(w, float(2 * ndtr(-abs(z))))


def bootstrap_interval(
    a: ArrayLike,
    b: ArrayLike,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.float64]:
    """Return a confidence interval of the difference of two models: BCa bootstrap over users (Efron, 1987).

    A resample draws n of the n users with replacement and takes the mean m* of their differences d_u = a_u - b_u. The
    interval lies between two quantiles of m*. They are not at (1 - level) / 2 and (1 + level) / 2 themselves but are
    corrected for bias and skewness: with G the normal distribution function, z its quantiles at these two levels, and m
    the mean of all d_u, the quantiles are at

        G(z0 + (z0 + z) / (1 - c (z0 + z)))
        z0 = G^-1(share of the resamples with m* < m, those with m* = m counted half)
        c  = sum of (d_u - m)^3 / (6 (sum of (d_u - m)^2)^(3/2))

    If all differences are the same, the interval is this value alone.

    Resample r is a function of the seed and r: its users are drawn from Philox with key `seed` and counter r. All
    columns have the same resamples. The sums are exact, so that neither the number of threads nor the other columns
    change a bit. Time grows with n `resamples`, memory with n alone.

    Parameters
    ----------
    a, b : [n] or [n, c], values of the same users in the same order, of one or of c metrics; n >= 2. For the interval
        of the mean of one model, `b` is 0.
    level : probability that the interval contains the difference of the population, approximately
    resamples : number of resamples, at least 100
    seed : of the resamples
    progress : called with (resamples done, resamples in total)

    Returns
    -------
    float64 [2] or [2, c], lower and upper end

    Examples
    --------
    >>> low, high = bootstrap_interval([3, 5, 4, 6], [2, 3, 4, 5])  # the mean is 1
    >>> print(low, high)
    0.25 1.75
    """
    from scipy.special import ndtr, ndtri

    _check_bootstrap(level, resamples, seed)
    given = _differences("bootstrap_interval", a, b, columns=True)
    d = np.ascontiguousarray(given.reshape(len(given), -1).T)  # [c, n]
    n = d.shape[1]
    # In units of 2^-b of the largest difference, b = 52 - log2 n, all sums are whole numbers below 2^53: exact.
    bits = 52 - int(n - 1).bit_length()
    unit = np.maximum(np.ldexp(1.0, np.frexp(np.abs(d).max(1))[1] - bits), np.finfo(np.float64).tiny)
    whole = np.rint(d / unit[:, None])
    sums = _resampled_sums(whole, resamples, seed, progress)

    tails = ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    interval = np.empty((2, len(whole)))
    for column, (values, drawn) in enumerate(zip(whole, sums.T, strict=True)):
        total = values.sum()
        share = ((drawn < total).sum() + (drawn == total).sum() / 2) / resamples
        z0 = ndtri(np.clip(share, 0.5 / resamples, 1 - 0.5 / resamples))
        centred = values - total / n
        scale = (centred**2).sum() ** 1.5
        skew = (centred**3).sum() / (6 * scale) if scale else 0.0
        interval[:, column] = np.quantile(drawn, ndtr(z0 + (z0 + tails) / (1 - skew * (z0 + tails))))
    interval *= unit / n
    return interval.reshape(2, *given.shape[1:])


# -- several tests -----------------------------------------------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of m tests, adjusted with Holm's method (1979), in the given order.

    With p_(1) <= ... <= p_(m), the i-th adjusted value is the largest of min(1, (m - j + 1) p_(j)) over j <= i. To
    reject where it is at most 0.05 keeps the probability of one or more false rejections at 0.05, however the tests
    depend on each other.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03, 0.5])  # 4 * 0.01, 3 * 0.03, the same again: 2 * 0.04 is less, 0.5
    [0.04, 0.09, 0.09, 0.5]
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise InputError(f"holm: `p_values` must be numbers from 0 to 1, got {p_values}; leave out what was not tested")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.arange(len(p), 0, -1) * p[order]))
    return [float(value) for value in adjusted]


# -- internal ----------------------------------------------------------------------------------------------------------


def _sample(where: str, name: str, values: ArrayLike, columns: bool = False) -> NDArray[np.float64]:
    """Return values as float64 [n], or [n, c] if `columns` are allowed; n >= 1."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim not in ((1, 2) if columns else (1,)) or sample.size == 0:
        raise InputError(f"{where}: `{name}` must be a list of one or more numbers, got shape {list(sample.shape)}")
    if not np.isfinite(sample).all():
        number = int(np.argwhere(~np.isfinite(sample))[0, 0])
        raise InputError(f"{where}: `{name}` has {sample[number]} at position {number}; give finite numbers only")
    return sample


def _differences(where: str, a: ArrayLike, b: ArrayLike, columns: bool = False) -> NDArray[np.float64]:
    """Return a - b of two or more users."""
    x, y = _sample(where, "a", a, columns), _sample(where, "b", b, columns)
    if x.shape != y.shape:
        raise InputError(
            f"{where}: `a` and `b` must have the same users, got shapes {list(x.shape)} and {list(y.shape)}"
        )
    if len(x) < 2:
        raise InputError(f"{where}: one user is not enough to tell a difference from chance; give two or more")
    return x - y


def _squared_error(values: NDArray[np.float64]) -> float:
    """Return s^2 / n, the squared standard error of the mean; exactly 0 if all values are equal."""
    return float(values.var(ddof=1) / len(values)) if np.ptp(values) else 0.0


def _student(t: Any, df: float) -> Significance:
    from scipy.special import stdtr

    return Significance(float(t), float(2 * stdtr(df, -abs(t))))


def _exact_p(doubled: NDArray[np.int64], w: float) -> float:
    """Return P(|W| >= |w|) if each rank, given doubled, has either sign with probability 1/2."""
    total = int(doubled.sum())
    chance = np.zeros(total + 1)  # of the sum of the doubled ranks with sign +
    chance[0] = 1.0
    for rank in doubled:
        chance[rank:] = (chance[rank:] + chance[:-rank]) / 2
        chance[:rank] /= 2
    # W = 2 (sum of the ranks with sign +) - (sum of all ranks) = (index) - (total / 2)
    return float(chance[np.abs(np.arange(total + 1) - total / 2) >= abs(w)].sum())


def _check_bootstrap(level: float, resamples: int, seed: int) -> None:
    if not 0 < level < 1:
        raise InputError(f"bootstrap_interval: `level` must be between 0 and 1, for example 0.95; got {level}")
    if resamples < 100:
        raise InputError(f"bootstrap_interval: `resamples` must be at least 100, got {resamples}")
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"bootstrap_interval: `seed` must be from 0 to {MAX_SEED}, got {seed}")


def _resampled_sums(
    whole: NDArray[np.float64], resamples: int, seed: int, progress: Callable[[int, int], None] | None
) -> NDArray[np.float64]:
    """Return the sums of resamples of the columns of `whole` [c, n]: float64 [resamples, c]."""
    n = whole.shape[1]
    sums = np.empty((resamples, len(whole)))
    counts = np.empty((BLOCK, n))  # how often each user is in each resample
    for start in range(0, resamples, BLOCK):
        block = counts[: resamples - start]
        for row in range(len(block)):
            rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, start + row]))
            block[row] = np.bincount(rng.integers(n, size=n), minlength=n)
        sums[start : start + len(block)] = block @ whole.T
        if progress is not None:
            progress(start + len(block), resamples)
    return sums
