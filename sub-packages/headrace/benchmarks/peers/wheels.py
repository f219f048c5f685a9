"""Single functions and classes from the wheels of libraries, which nobody installs or imports.

Importing their packages would take ray, tensordict, vllm and CUDA builds, and some wheels are for a newer Python. None
of these functions needs any of that.
"""

import __future__

import ast
import bisect
import copy
import dataclasses
import gc
import heapq
import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from functools import cache, lru_cache
from importlib import import_module
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np
import torch
from measure import wheel_of
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler


@cache
def definitions(package: str, path: str, *names: str, **more: Any) -> SimpleNamespace:
    """Run the named functions and classes of a file in a wheel, and nothing else of it."""
    file = wheel_of(package)
    if file is None:
        raise FileNotFoundError(f"no wheel of {package}: ./scripts/peers fetches it")
    with ZipFile(file) as wheel:
        [member] = [name for name in wheel.namelist() if name.split(".data/purelib/")[-1] == path]
        tree = ast.parse(wheel.read(member))
    tree.body = [part for part in tree.body if getattr(part, "name", None) in names]
    namespace: dict[str, Any] = {**SURROUNDINGS, **more, "__name__": __name__}
    exec(compile(tree, f"{file}/{path}", "exec", __future__.annotations.compiler_flag), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


class Configured:
    """Stands for torchtitan's base of classes that have a ``Config``."""

    class Config:
        """Nothing."""


class Late(ModuleType):
    """A module that is imported where a function first looks into it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


SURROUNDINGS: dict[str, Any] = {  # what their files import, as far as these functions use it
    "ABC": ABC,
    "BatchConfig": None,
    "BatchSampler": BatchSampler,
    "Configurable": Configured,
    "LOG": logging.getLogger(__name__),
    "Literal": Literal,
    "RandomSampler": RandomSampler,
    "Sampler": Sampler,
    "SequentialSampler": SequentialSampler,
    "abstractmethod": abstractmethod,
    "bisect": bisect,
    "ceil": math.ceil,
    "chain": chain,
    "copy": copy,
    "dataclass": dataclasses.dataclass,
    "defaultdict": defaultdict,
    "deque": deque,
    "dist": torch.distributed,
    "field": dataclasses.field,
    "gc": gc,
    "get_context": lambda _: None,
    "heapq": heapq,
    "log2": math.log2,
    "logger": SimpleNamespace(warning=lambda *_: None),
    "lru_cache": lru_cache,
    "math": math,
    "np": np,
    "numba": Late("numba"),
    "os": SimpleNamespace(environ={}),  # without a world size
    "pa": Late("pyarrow"),
    "pc": Late("pyarrow.compute"),
    "pyarrow": Late("pyarrow"),
    "torch": torch,
    "tu": SimpleNamespace(index_select_tensor_dict=lambda _, indices: indices),
}
