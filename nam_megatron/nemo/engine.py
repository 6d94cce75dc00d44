"""In the place of Transformer Engine, which Megatron-Bridge imports at its first line: names, no kernels (torch side).

Whatever is imported from here is there, as an empty class. Enough to make, print and validate configs; building a model fails.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

import torch

from nam_megatron.targets import current

NAME = "transformer_engine"


def provide() -> None:
    """Have `import transformer_engine` find names in this process from now on."""
    sys.meta_path.insert(0, _Finder())
    importlib.import_module(f"{NAME}.common.recipe")  # Megatron takes it from its package without importing it


class _Class(type):
    def __getattr__(cls, name: str) -> type:
        return _made(cls, name)


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  as Python has it
    __version__ = current().te_version

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
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name == NAME or name.startswith(f"{NAME}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
