"""Token lists that begin alike, as a tree: what they share is computed once."""

from __future__ import annotations

from collections.abc import Sequence


class PrefixTree:
    """Token lists as a tree of their common beginnings, in depth-first order.

    ids, depths, before (place of the parent, -1 for a root), until (last place of the subtree): one a token.
    paths: the places of each list's tokens, in the order given.
    """

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        """Lists that are equal share all their tokens; a list may end inside another, and none may be empty."""
        self.ids: list[int] = []
        self.depths: list[int] = []
        self.before: list[int] = []
        self.until: list[int] = []
        self.paths: list[list[int]] = [[] for _ in lists]
        path: list[int] = []
        # Sorted, so that whoever shares a beginning with an earlier list shares it with the one just before.
        for n in sorted(range(len(lists)), key=lambda n: list(lists[n])):
            tokens = lists[n]
            shared = 0
            while shared < min(len(path), len(tokens)) and self.ids[path[shared]] == tokens[shared]:
                shared += 1
            self._close(path[shared:])
            del path[shared:]
            for token in tokens[shared:]:
                self.depths.append(len(path))
                self.before.append(path[-1] if path else -1)
                self.until.append(-1)
                path.append(len(self.ids))
                self.ids.append(token)
            self.paths[n] = path.copy()
        self._close(path)

    def _close(self, places: Sequence[int]) -> None:
        for place in places:
            self.until[place] = len(self.ids) - 1
