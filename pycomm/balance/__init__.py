"""Batches by the speed of machines: ``pycomm.BalancedSampler``."""
