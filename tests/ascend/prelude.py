"""First import of every process that has the Ascend environment.

Models that we leave alone import torchvision, which fails beside a CPU torch: an empty one stands for it,
after transformers has seen that there is none.
"""

from __future__ import annotations

import sys
import types

from transformers.utils import is_torchvision_available


def pretend_torchvision() -> None:
    """Makes `from torchvision.transforms.v2 import functional` work."""
    assert not is_torchvision_available()  # the answer is kept
    parent = None
    for name in ("torchvision", "transforms", "v2", "functional"):
        module = types.ModuleType(name if parent is None else f"{parent.__name__}.{name}")
        module.__path__ = []
        sys.modules[module.__name__] = module
        if parent is not None:
            setattr(parent, name, module)
        parent = module


pretend_torchvision()
