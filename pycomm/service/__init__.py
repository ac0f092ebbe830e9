"""A parameter service: workers push gradients to servers, which step, and pull parameters."""

from __future__ import annotations

from pycomm.service.client import ParameterClient, RefusedError
from pycomm.service.core import ServerStats
from pycomm.service.server import ParameterServer

__all__ = ["ParameterClient", "ParameterServer", "RefusedError", "ServerStats"]
