"""batches -> weights

The package is also the function that the Python interface promises, `from bothways import train`: whoever imports a
module of it puts the package in the place of any function of that name, so the package itself can be called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`bothways.train(config, output)` is `bothways.experiment.train`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("bothways.experiment").train(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
