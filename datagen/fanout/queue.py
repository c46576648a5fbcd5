"""The rows that wait, in the order in which they should be sent. No clock, no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from datagen.fanout.rows import Role, Row

KINDS = (Role.GENERATE, Role.CAPTURE)


class RowQueue:
    """One queue for all servers; rows are taken by what a server can do.

    Rows that were in flight at too many server deaths wait apart, as suspects.
    """

    def __init__(self, deaths: int) -> None:
        self._deaths = deaths
        self._heaps: dict[Role, list[tuple[int, int, Row]]] = {kind: [] for kind in KINDS}
        self._suspects: list[tuple[int, int, Row]] = []

    def __len__(self) -> int:
        return len(self._suspects) + sum(map(len, self._heaps.values()))

    def __bool__(self) -> bool:
        return bool(self._suspects) or any(self._heaps.values())

    @property
    def roles(self) -> Role:
        """What the rows that wait need of a server."""
        wanted = Role(0)
        for kind, heap in self._heaps.items():
            wanted |= kind if heap else Role(0)
        for _, _, row in self._suspects:
            wanted |= row.work.role
        return wanted

    @property
    def has_suspects(self) -> bool:
        """True when rows wait to be tried alone, wanted or not."""
        return bool(self._suspects)

    @property
    def next_suspect(self) -> Row | None:
        """The row that waits to be tried alone, if any."""
        self._settle(self._suspects)
        return self._suspects[0][2] if self._suspects else None

    def suspect(self, row: Row) -> bool:
        """True when `row` must be tried alone."""
        return row.deaths >= self._deaths

    def push(self, row: Row) -> None:
        """Add a row, ahead of those of its priority that came after it."""
        heap = self._suspects if self.suspect(row) else self._heaps[row.work.role]
        heapq.heappush(heap, (row.work.priority, row.order, row))

    def pop(self, role: Role) -> Row | None:
        """The next row for servers of `role`; None when nothing waits for them."""
        heaps = [self._heaps[kind] for kind in KINDS if kind & role]
        for heap in heaps:
            self._settle(heap)
        ready = [heap for heap in heaps if heap]
        return heapq.heappop(min(ready, key=lambda h: h[0][:2]))[2] if ready else None

    def pop_suspect(self, role: Role) -> Row | None:
        """The next suspect, if servers of `role` can try it."""
        row = self.next_suspect
        if row is None or not row.work.role & role:
            return None
        heapq.heappop(self._suspects)
        return row

    def drain(self) -> Iterator[Row]:
        """Take everything out."""
        for heap in (*self._heaps.values(), self._suspects):
            yield from (row for _, _, row in heap)
            heap.clear()

    @staticmethod
    def _settle(heap: list[tuple[int, int, Row]]) -> None:
        """Drop from the top what nobody waits for any more."""
        while heap and heap[0][2].future.done():
            heapq.heappop(heap)
