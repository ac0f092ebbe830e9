"""A parameter service: workers push gradients to servers, which step, and pull parameters."""

from __future__ import annotations

from pycomm.service.client import ParameterClient, RefusedError
from pycomm.service.server import ParameterServer, ServerStats

__all__ = ["ParameterClient", "ParameterServer", "RefusedError", "ServerStats"]
