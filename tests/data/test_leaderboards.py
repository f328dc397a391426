"""The published results: sizes and order."""

from drm_triton.data.leaderboards import PUBLIC_SPLITS, Result, leaderboard, protocol


def test_results_are_shares_in_ascending_order_and_say_where_they_come_from() -> None:
    for split in PUBLIC_SPLITS.values():
        recalls = [result.recall for result in split.results]
        assert recalls == sorted(recalls)
        assert all(0 < result.ndcg < result.recall < 1 and result.source for result in split.results)
        assert len({result.model for result in split.results}) == len(split.results)
        assert split.train > split.test > split.users > 0


def test_only_public_splits_have_a_leaderboard_and_its_protocol() -> None:
    assert leaderboard({"public_split": "amazon-cds-m1"})[-1] == Result("SimpleX", 0.1763, 0.1145)
    assert protocol({"public_split": "amazon-cds-m1"}) == ((10, 20, 50), 1)
    for meta in ({}, {"public_split": None}, {"public_split": "of another version"}, {"source": "gowalla"}):
        assert leaderboard(meta) == []
        assert protocol(meta) == ((10, 50), 5)
