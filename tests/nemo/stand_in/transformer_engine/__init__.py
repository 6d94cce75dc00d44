"""In the place of Transformer Engine, which Megatron-Bridge imports and which cannot be built without a CUDA toolkit: names, no kernels.

Whatever is imported from here is there, as an empty class. Enough to make and validate configs; building a model fails.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "2.20.2"  # as runtime/oracle.py pretends


class _Class(type):
    def __getattr__(cls, name: str) -> type:
        return _made(cls, name)


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = __version__

    def __getattr__(self, name: str) -> type:
        return _made(self, name)


def _made(owner: type | types.ModuleType, name: str) -> type:
    """The empty class `name` of a module or class, kept there."""
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Class(name, (torch.nn.Module,), {"__module__": owner.__name__})
    setattr(owner, name, made)
    return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())

importlib.import_module(f"{__name__}.common.recipe")  # Megatron takes it from here without importing it
