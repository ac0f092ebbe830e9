"""The one place that Python code reads the version from; pyproject.toml states the same."""

__version__ = "0.2.0"
