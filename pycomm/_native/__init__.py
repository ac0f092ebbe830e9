"""The extension's loader, and what its threads, futures and records leave in Python."""
