"""Text of kernels' constants: the compiler's disk cache files machine code under it."""

import dataclasses

import pytest
import torch

from envoi.epilogues.lower import FUNCTIONS, Lowered
from tools.kernel_cases import kernel_cases


def found_in(value) -> list:
    """Return every dataclass of ours in a constant argument, tuples and fields included."""
    if isinstance(value, tuple):
        return [found for part in value for found in found_in(part)]
    if not dataclasses.is_dataclass(value) or not type(value).__module__.startswith("envoi."):
        return []
    return [value] + [found for field in dataclasses.fields(value) for found in found_in(getattr(value, field.name))]


@pytest.fixture(scope="module")
def constants() -> dict[type, list]:
    """Return the constants of every fourth kernel, by class: among them are all classes."""
    found: dict[type, list] = {}
    for case in list(kernel_cases().values())[::4]:
        for value in case.launch().arguments:
            for constant in found_in(value):
                found.setdefault(type(constant), []).append(constant)
    return found


def other(value):
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return {"e4m3": "bf16", "bf16": "nvfp4"}.get(value, value + "x")  # weights of other kinds have no sizes
    if isinstance(value, tuple):
        return (*value, 1)
    if isinstance(value, torch.dtype):
        return torch.bfloat16 if value == torch.float16 else torch.float16
    field = dataclasses.fields(value)[0]
    return with_field(value, field.name, other(getattr(value, field.name)))


def with_field(constant, name: str, value):
    """Return a copy that differs in a field, without validation."""
    copied = object.__new__(type(constant))
    copied.__dict__.update({**vars(constant), name: value})
    return copied


def test_every_field_is_in_the_text(constants):
    assert {"Config", "MxConfig", "BlackwellConfig", "Lowered", "RouterTiling", "Spec", "Side"} <= {
        c.__name__ for c in constants
    }
    for cls, values in constants.items():
        constant = values[0]
        for field in dataclasses.fields(constant):
            value = getattr(constant, field.name)
            if field.name in FUNCTIONS and cls is Lowered:
                changed = next(name for name in FUNCTIONS if name != field.name)
                value = getattr(constant, changed)
            elif value is None:
                value = next(x for x in (getattr(each, field.name) for each in values) if x is not None)
            else:
                value = other(value)
            assert str(with_field(constant, field.name, value)) != str(constant), f"{cls}.{field.name}"


def test_equal_constants_have_one_text(constants):
    for cls, values in constants.items():
        texts = {str(dataclasses.replace(value)) for value in values}
        assert texts == {str(value) for value in values}
        if cls is not Lowered:  # one object each
            assert len(texts) == len(set(values))


def test_what_a_class_makes_of_its_fields_is_in_the_text(constants):
    """Test derived properties: a release may change one, and kernels compiled before hold the old value."""
    for cls, values in constants.items():
        properties = [name for name, value in vars(cls).items() if isinstance(value, property)]
        for name in properties if cls is not Lowered else ():
            changed = type(cls.__name__, (cls,), {name: property(lambda self: -1)})
            fields = {field.name: getattr(values[0], field.name) for field in dataclasses.fields(cls)}
            assert str(changed(**fields)) != str(values[0]), f"{cls}.{name}"
