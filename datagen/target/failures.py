"""How a request can fail, by what must follow: try the row again, slow down, or leave the server alone."""

from __future__ import annotations


class RequestFailure(Exception):
    """A request did not give a usable answer; `reason` is a short stable name for counters."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class RowFailure(RequestFailure):
    """The row is at fault. `permanent`: the same request can never succeed, so no attempt is wasted."""

    def __init__(self, reason: str, detail: str = "", *, permanent: bool = False):
        super().__init__(reason, detail)
        self.permanent = permanent


class CapacityFailure(RequestFailure):
    """The server is full (429, 503): the window shrinks, the row is not charged."""

    def __init__(self, reason: str, detail: str = "", *, retry_after_s: float | None = None):
        super().__init__(reason, detail)
        self.retry_after_s = retry_after_s


class EndpointFailure(RequestFailure):
    """The server is at fault. `in_flight`: it had the request when it failed, so the row may be the cause."""

    def __init__(self, reason: str, detail: str = "", *, in_flight: bool = True):
        super().__init__(reason, detail)
        self.in_flight = in_flight
