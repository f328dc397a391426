"""Train a two-tower model on user and item features with drm_loss, and print NDCG@10 before and after.

    python examples/two_tower.py

Users and items have features, and a hidden bilinear function of them decides what a user likes. One tower embeds the
features of a user, the other those of an item. The score is the inner product of the two embeddings. A fifth of the
interactions is held out. The model must learn from the features: it has no embedding for a single user or item.
"""

import argparse

import torch
from torch import Tensor, nn

from drm_triton import drm_loss

N_FEATURES = 16


class TwoTower(nn.Module):
    """Scores [B, n] of user features [B, f] and item features [B, n, f] or, for all items, [n, f]."""

    def __init__(self, n_features: int, d: int = 32) -> None:
        super().__init__()
        self.user, self.item = (nn.Sequential(nn.Linear(n_features, 64), nn.ReLU(), nn.Linear(64, d)) for _ in range(2))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Compute the inner products of the two embeddings."""
        return (self.item(items) @ self.user(users).unsqueeze(-1)).squeeze(-1)


def synthetic(n_users: int, n_items: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return user features, item features, and train and held-out interactions as bool [n_users, n_items]."""
    users, items = torch.randn(n_users, N_FEATURES), torch.randn(n_items, N_FEATURES)
    affinity = users @ torch.randn(N_FEATURES, N_FEATURES) @ items.T / N_FEATURES
    noisy = affinity + 0.3 * torch.randn_like(affinity)
    liked = noisy >= noisy.quantile(0.95, dim=1, keepdim=True)  # each user likes one item in twenty
    held_out = liked & (torch.rand_like(affinity) < 0.2)
    return users, items, liked & ~held_out, held_out


def ndcg(scores: Tensor, held_out: Tensor, seen: Tensor, k: int = 10) -> float:
    """Compute NDCG@k over all unseen items, averaged over users with a held-out item."""
    ranking = scores.masked_fill(seen, -torch.inf).topk(k).indices
    discount = 1 / torch.log2(torch.arange(2.0, k + 2))
    relevant = held_out.sum(1)
    ideal = torch.cat([torch.zeros(1), discount.cumsum(0)])[relevant.clamp(max=k)]
    gained = (held_out.gather(1, ranking) * discount).sum(1)
    return (gained / ideal)[relevant > 0].mean().item()


def main(steps: int, n_users: int, n_items: int, seed: int) -> tuple[float, float]:
    """Train the model and return NDCG@10 before and after."""
    torch.manual_seed(seed)
    users, items, train, held_out = synthetic(n_users, n_items)
    model = TwoTower(N_FEATURES)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    with torch.no_grad():
        before = ndcg(model(users, items), held_out, train)
    # A list has 3 positives and 45 other items of a user, like the lists that the package samples.
    relevance = (torch.arange(48) < 3).expand(64, 48)
    for step in range(1, steps + 1):
        batch = torch.randint(n_users, (64,))
        key = train[batch] + torch.rand(64, n_items)  # random order with positives first
        lists = torch.cat([key.topk(3).indices, key.topk(45, largest=False).indices], dim=1)
        loss = drm_loss(model(users[batch], items[lists]), relevance, tau=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    with torch.no_grad():
        after = ndcg(model(users, items), held_out, train)
    print(f"NDCG@10 on held-out items: before {before:.4f}, after {after:.4f}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.users, options.items, options.seed)
