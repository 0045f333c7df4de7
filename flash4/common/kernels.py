"""Kernel classes by name."""

import importlib


def load_kernel(kernel: str, config):
    """Instantiate a kernel class.

    Args:
        kernel: ``"module:class"``.
        config: the frozen config that the class takes.
    """
    module, name = kernel.split(":")
    return getattr(importlib.import_module(module), name)(config)
