"""Requests to services on this host: a proxy of the environment does not know them."""

from __future__ import annotations

import urllib.request
from typing import Any

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(request: str | urllib.request.Request, timeout_s: float) -> Any:
    """`urllib.request.urlopen` without proxies; the answer is to be closed. Raises OSError."""
    return _opener.open(request, timeout=timeout_s)
