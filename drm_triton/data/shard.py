"""`Shard`: one of n consecutive ranges of users, of about the same size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drm_triton.errors import InputError


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` parts of the users, numbered from 0."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that a text such as 3/16 names.

        Examples
        --------
        >>> Shard.parse("3/16")
        Shard(index=3, count=16)
        """
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text, re.ASCII)
        if found is None:
            raise InputError(f"`shard` must be i/n, for example 0/16 for the first of 16 shards, got {text!r}")
        index, count = int(found[1]), int(found[2])
        if index >= count:
            numbers = f": shards are numbered from 0, so n = {count} has 0/{count} .. {count - 1}/{count}"
            raise InputError(f"`shard` {text.strip()} does not exist{numbers if count else ': n must be at least 1'}")
        return cls(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def users(self, n_users: int) -> range:
        """Return the codes of the users of this shard.

        Examples
        --------
        >>> [Shard(index, 3).users(10) for index in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
        """
        return range(self.index * n_users // self.count, (self.index + 1) * n_users // self.count)
