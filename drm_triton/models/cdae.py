"""CDAE: a denoising autoencoder with a node for each user."""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, softplus

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.cdae import Tables, Visits, encode, visit_users
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.reference import philox
from drm_triton.kernels.streams import POSITIVES
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.models.base import FactorModel, Progress
from drm_triton.models.configs import CDAEConfig
from drm_triton.ranking.topk import with_bias
from drm_triton.recommender import Tensors

INITIAL_STATE = 1e-4  # of Adagrad's sums of squared gradients
# Added to their root with sampled outputs, as in the authors' experiments: first steps are then proportional to the
# gradient. With all outputs it is 0, the default of their program, which ranks better there.
BETA = 1.0
VISITS = 1024  # users visited between two reports of progress
USERS_PER_STEP = 32  # in a step with all outputs
ITEMS_PER_TASK = 2048  # outputs of a task, in a step with all outputs


class CDAE(FactorModel[CDAEConfig]):
    """CDAE, a collaborative denoising autoencoder (Wu, DuBois, Zheng and Ester, WSDM 2016) with one hidden layer.

    The scores of a user with the items P_u are

        h = sigmoid(delta sum_{i in x} W_i + P_u + b),     y_i = V_i . h + c_i

    where P_u also denotes the user's node. In training, x keeps each item of the user with probability
    1 - `corruption`, and delta = 1 / (1 - `corruption`); otherwise x holds all items, and delta = 1. If `tied`, V = W.
    The loss of a user is the sum of log(1 + exp(-y_i)) over the user's items and of log(1 + exp(y_j)) over negatives,
    plus `regularization` / 2 times the squared norms of the rows that take part. The optimiser is Adagrad.

    - `output` "sampled", the default: users are visited one after the other, and the negatives are `ratio` times as
      many random items as the user has. Training runs on one thread of the CPU.
    - `output` "full": all other items are negatives, and a step has the summed loss of 32 users, which deviates from
      the authors' steps of one user. It runs on all threads, or on a GPU, in products of matrices.

    "sampled" is the default because of its cost. On Last.fm (17,632 items, one seed), an epoch of "full" takes 19 times
    the processor time, or 11 times if `tied`. After 50 epochs (`drm-triton train --model cdae --eval-every 0`), NDCG@10
    and Recall@50 on the validation part are 0.151 and 0.368 with "full", and 0.142 and 0.366 with "sampled". So "full"
    ranks slightly better where there is time for it.

    The authors train 50 epochs with `lr` 0.1, `regularization` 0.01 and 5 negatives per item. Their equations have
    separate vectors, as here by default, and their program has tied ones.

    A fitted model is a factor model with the user vectors [h, 1] and the item vectors [V, c]. A new user has no node.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "z"]})
    >>> model = CDAE(factors=4, epochs=20).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    >>> model.recommend_from({"dora": ["x"]}, k=1)["item"].to_list()
    ['y']
    """

    Config = CDAEConfig
    biased = True
    user_tensors = frozenset({"user", "user_state", "hidden"})

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes that training needs by purpose, besides the interactions."""
        config, row = self.config, 4 * self.config.factors
        parameters = row * (n_users + n_items * (1 if config.tied else 2) + 1) + 4 * n_items
        needed = {"parameters": parameters, "adagrad": parameters, "hidden layers": row * n_users}
        if config.output == "full":
            width = USERS_PER_STEP * min(n_items, ITEMS_PER_TASK)
            needed["outputs"] = 3 * 4 * width * threads.n_threads()
            needed["gradient"] = 3 * row * n_items
        return needed

    def start(self, fit: CSR) -> Tensors:
        """Return random vectors, biases of 0, the state of Adagrad, and the hidden layers."""
        (n_users, n_items), d = fit.shape, self.config.factors
        rng = np.random.Generator(np.random.Philox(self.config.seed))
        width = np.float32(4 * (6 / (n_items + d)) ** 0.5)
        values = {
            name: torch.from_numpy((2 * rng.random((size, d), dtype=np.float32) - 1) * width)
            for name, size in self._rows(n_users, n_items).items()
        }
        values |= {"hidden_bias": torch.zeros(d), "item_bias": torch.zeros(n_items)}
        tensors = values | {f"{name}_state": torch.full_like(x, INITIAL_STATE) for name, x in values.items()}
        tensors["hidden"] = torch.empty(n_users, d)
        self._encode(tensors, fit)
        return tensors

    def _rows(self, n_users: int, n_items: int) -> dict[str, int]:
        """Return the tables of vectors with their numbers of rows."""
        return {"input": n_items, "user": n_users} | ({} if self.config.tied else {"output": n_items})

    def layout(self, n_users: int, n_items: int) -> Tensors:
        """Return vectors, biases, Adagrad's sums and hidden layers without content."""
        d = self.config.factors
        values = {name: torch.empty(n, d, device="meta") for name, n in self._rows(n_users, n_items).items()}
        values |= {name: torch.empty(n, device="meta") for name, n in (("hidden_bias", d), ("item_bias", n_items))}
        states = {f"{name}_state": x for name, x in values.items()}
        return values | states | {"hidden": torch.empty(n_users, d, device="meta")}

    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """Visit all users once."""
        run = self._sampled if self.config.output == "sampled" else self._full
        loss = run(tensors, fit, number, progress)
        self._encode(tensors, fit)
        return {"loss": loss / max(1, int(np.count_nonzero(fit.degrees())))}

    def _encode(self, tensors: Tensors, fit: CSR) -> None:
        """Compute the hidden layer of each user from all of the user's items."""
        W, P, b = (tensors[name].numpy() for name in ("input", "user", "hidden_bias"))
        tensors["hidden"].copy_(torch.from_numpy(encode(fit, W, P, b)))

    def _sampled(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> float:
        """Visit each user with sampled negatives; return the sum of the losses."""
        config, (n_users, n_items) = self.config, fit.shape
        tables, states = (Tables(*(x.numpy() for x in group)) for group in parameters(tensors))
        visits = Visits(
            np.uint64(config.seed),
            np.uint64(4 * number),
            fit.indptr,
            fit.indices,
            n_items,
            config.ratio,
            np.uint64(dropped_below(config.corruption)),
            1 / (1 - config.corruption),
            config.tied,
            config.lr,
            config.regularization,
            BETA,
        )
        times, loss = np.zeros(n_items, np.int32), 0.0
        for start in range(0, n_users, VISITS):
            stop = min(start + VISITS, n_users)
            loss += visit_users(start, stop, visits, tables, states, times)
            progress(stop, n_users)
        return loss

    def _full(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> float:
        """Take a step with all outputs for each batch of users; return the sum of the losses."""
        device, n_users = self.backend()[1], fit.shape[0]
        moved = {name: to_device(x, device) for name, x in tensors.items()}
        losses = []
        with one_torch_thread():
            for start in range(0, n_users, USERS_PER_STEP):
                stop = min(start + USERS_PER_STEP, n_users)
                losses.append(full_step(moved, fit, range(start, stop), number, self.config))
                progress(stop, n_users)
        for name, x in moved.items():
            tensors[name].copy_(x)
        return float(torch.stack(losses).sum())

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return "a lower `lr`"

    def learned(self, tensors: Tensors) -> Tensors:
        """Return what a fitted model needs: neither the nodes of users nor the state of Adagrad."""
        needed = ("input", "output", "hidden_bias", "item_bias", "hidden")
        return {name: tensors[name] for name in needed if name in tensors}

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user vectors [h, 1] and item vectors [V, c]."""
        return with_bias(tensors["hidden"], tensors.get("output", tensors["input"]), tensors["item_bias"])

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors [h, 1] of new users, whose nodes are 0."""
        W, b = (self.tensors[name].cpu().numpy() for name in ("input", "hidden_bias"))
        H = torch.from_numpy(encode(liked, W, W[:0], b)).to(self.item_factors.device)
        return torch.cat([H, H.new_ones(len(H), 1)], 1)


def parameters(tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters W, V, P, b, c and the states of Adagrad. V is W if they are tied."""
    names = ["input", "output" if "output" in tensors else "input", "user", "hidden_bias", "item_bias"]
    return [tensors[name] for name in names], [tensors[f"{name}_state"] for name in names]


def dropped_below(corruption: float) -> int:
    """Return the number of 32-bit words for which an item is left out of the input."""
    return int(corruption * 2**32)


def full_step(tensors: Tensors, fit: CSR, users: range, epoch: int, config: CDAEConfig) -> Tensor:
    """Take one step with all outputs for consecutive users, in place, on the device of the tensors.

    Items are processed in blocks, so that the scores of a batch are never held at once. Their sums, and those of the
    rows of an item, have a fixed order.

    Returns
    -------
    float64 []
        Loss of these users before the step.
    """
    (W, V, P, b, c), (W_state, V_state, P_state, b_state, c_state) = parameters(tensors)
    device, n_items, rows = V.device, len(V), slice(users.start, users.stop)
    degrees = fit.degrees()[rows]
    own = slice(fit.indptr[users.start], fit.indptr[users.stop])
    number = np.repeat(np.arange(len(users)), degrees)  # of each interaction's user in the batch
    place = np.arange(own.stop - own.start) - np.repeat(np.cumsum(degrees) - degrees, degrees)  # in the user's items
    items, user, position = (
        to_device(torch.from_numpy(x.astype(np.int64)), device) for x in (fit.indices[own], number, place)
    )
    words = torch.stack(philox(config.seed, epoch, POSITIVES, user + users.start, position // 4))
    kept = words.gather(0, (position % 4)[None])[0] >= dropped_below(config.corruption)
    scale = 1 / (1 - config.corruption)

    h = sum_rows(W, items[kept], user[kept], len(users)).mul_(scale).add_(P[rows]).add_(b).sigmoid_()
    item_order = items.argsort(stable=True)
    items, user, kept = items[item_order], user[item_order], kept[item_order]
    starts = list(range(0, n_items, ITEMS_PER_TASK))
    bounds = torch.searchsorted(items, torch.tensor([*starts, n_items], device=device)).tolist()
    dV, dc = torch.empty_like(V), torch.empty_like(c)
    dh, losses = h.new_empty(len(starts), *h.shape), h.new_empty(len(starts), dtype=torch.float64)

    def of_items(block: int) -> None:
        outputs, inside = slice(starts[block], starts[block] + ITEMS_PER_TASK), slice(*bounds[block : block + 2])
        positives = user[inside], items[inside] - outputs.start
        y = torch.addmm(c[outputs], h, V[outputs].T)
        losses[block] = softplus(y).sum(dtype=torch.float64) - y[positives].sum(dtype=torch.float64)
        g = y.sigmoid_()
        g[positives] -= 1
        torch.mm(g.T, h, out=dV[outputs])
        torch.sum(g, 0, out=dc[outputs])
        torch.mm(g, V[outputs], out=dh[block])

    tasks = [partial(of_items, block) for block in range(len(starts))]
    if device.type == "cpu":
        threads.run(tasks)
    else:
        for task in tasks:
            task()
    dz = dh.sum(0).mul_(h).mul_(1 - h)
    ridge, lr = config.regularization, config.lr
    dW = sum_rows(dz, user[kept], items[kept], n_items).mul_(scale)
    if config.tied:
        dV += dW
    else:
        touched = W.new_zeros(n_items, 1).index_fill_(0, items[kept], 1)
        adagrad(W, W_state, dW + ridge * touched * W, lr)
    adagrad(V, V_state, dV.add_(V, alpha=ridge), lr)
    adagrad(c, c_state, dc.add_(c, alpha=ridge), lr)
    adagrad(P[rows], P_state[rows], dz + ridge * P[rows], lr)
    adagrad(b, b_state, dz.sum(0) + ridge * b, lr)
    return losses.sum()


def sum_rows(table: Tensor, rows: Tensor, groups: Tensor, n_groups: int) -> Tensor:
    """Return the sum of the given rows of each group: [n_groups, d]. `groups` is ascending."""
    offsets = torch.searchsorted(groups, torch.arange(n_groups + 1, device=groups.device))
    return embedding_bag(rows, table, offsets, mode="sum", include_last_offset=True)


def adagrad(x: Tensor, state: Tensor, gradient: Tensor, lr: float) -> None:
    """Take one step of Adagrad in place."""
    state.addcmul_(gradient, gradient)
    x.addcdiv_(gradient, state.sqrt(), value=-lr)
