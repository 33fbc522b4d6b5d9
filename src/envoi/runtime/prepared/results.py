"""Results of calls: the tensors in them, and how to make a result of the same form from other tensors."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Build = Callable[[Sequence[torch.Tensor]], Any]


def take_apart(result: Any, tensors: list[torch.Tensor]) -> Build:
    """Append a result's tensors to a list, and return the function that makes such a result from such a list.

    result: a tensor, a dataclass, tuple, list or dict of results, or any other value, which is kept.
    """
    if isinstance(result, torch.Tensor):
        index = len(tensors)
        tensors.append(result)
        return lambda found: found[index]
    if isinstance(result, dict):
        names, parts = list(result), [take_apart(x, tensors) for x in result.values()]
        return lambda found: {name: part(found) for name, part in zip(names, parts, strict=True)}
    if isinstance(result, tuple | list):
        kind, parts = type(result), [take_apart(x, tensors) for x in result]
        return lambda found: kind([part(found) for part in parts])
    if is_dataclass(result):
        kind, parts = type(result), [take_apart(getattr(result, field.name), tensors) for field in fields(result)]
        return lambda found: kind(*[part(found) for part in parts])
    return lambda found: result
