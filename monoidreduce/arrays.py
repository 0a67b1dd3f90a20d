"""Arrays that are not torch's, at the border of a call: numpy arrays and anything with DLPack become tensors.

A call asks here only when it met something that is no tensor, so calls with tensors pay nothing. Memory is shared where
it can be; what torch has no type for is converted, or refused by the argument's name, type and shape. Where all arrays
of a call are numpy's its results are numpy arrays too; with a tensor or another library's array among them, tensors.
May import the errors alone.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from .errors import ArgumentError, DTypeError, MonoidReduceError, StreamError, shown

_WIDER = {"uint16": numpy.int64, "uint32": numpy.int64, "uint64": numpy.int64}  # torch has hardly a function for these


def is_array(value: Any) -> bool:
    """Whether a value is an array, but no tensor: numpy's, or one that can be handed over by DLPack."""
    kind = type(value)
    if kind.__module__.startswith("monoidreduce."):  # the symbols of a body answer to every name that tensors have
        return False
    return isinstance(value, numpy.ndarray) or (hasattr(kind, "__dlpack__") and not isinstance(value, Tensor))


def has_arrays(values: Iterable[Any]) -> bool:
    """Whether any of these, or of the entries of a pair of them, is an array that is no tensor."""
    for value in values:
        if is_array(value) or (type(value) in (tuple, list) and len(value) == 2 and any(map(is_array, value))):
            return True
    return False


class Border:
    """One call's arrays: :meth:`take` what comes in, :meth:`give` what goes out in the kind of what came in."""

    def __init__(self) -> None:
        self.of_numpy = self.of_others = False

    def take(self, value: Any, name: str) -> Any:
        """An argument with tensors in place of arrays, also inside a pair, a dict or a list."""
        if isinstance(value, Tensor):
            self.of_others = True
        elif is_array(value):
            self.of_numpy = self.of_numpy or isinstance(value, numpy.ndarray)
            self.of_others = self.of_others or not isinstance(value, numpy.ndarray)
            return to_tensor(value, name)
        elif type(value) in (tuple, list) and len(value) == 2:
            return type(value)(self.take(v, name) for v in value)
        elif isinstance(value, Mapping):
            return {key: self.take(v, str(key)) for key, v in value.items()}
        return value

    def give(self, result: Any) -> Any:
        """A result as it is, or, where all that came in was numpy's, with numpy arrays in place of tensors."""
        return to_numpy(result) if self.of_numpy and not self.of_others else result


def call_with_tensors(
    call: Callable[..., Any], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call with tensors in place of arrays; the result in the arrays' kind. ``names``: of the positional arguments."""
    border = Border()
    known = [*names[: len(args)], *(f"argument {k}" for k in range(len(names), len(args)))]
    given = [border.take(value, name) for value, name in zip(args, known, strict=True)]
    named = {name: border.take(value, name) for name, value in kwargs.items()}
    return border.give(call(*given, **named))


def are_traced(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``torch.compile`` traces a call with numpy arrays; written so that it can read it."""
    return any([isinstance(v, numpy.ndarray) for v in [*args, *kwargs.values()]])


def call_traced(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """:func:`call_with_tensors` as ``torch.compile`` can read it: there every array is a tensor already."""
    mixed = any([isinstance(v, Tensor) for v in [*args, *kwargs.values()]])
    given = [torch.as_tensor(v) if isinstance(v, numpy.ndarray) else v for v in args]
    named = {n: torch.as_tensor(v) if isinstance(v, numpy.ndarray) else v for n, v in kwargs.items()}
    result = call(*given, **named)
    return result if mixed else to_numpy(result)


def to_tensor(array: Any, name: str = "an array") -> Tensor:
    """A tensor of an array, over its memory where torch can read it; ``name``: the argument's, for messages."""
    if isinstance(array, Tensor):
        return array
    try:
        return _from_numpy(array, name) if isinstance(array, numpy.ndarray) else torch.from_dlpack(array)
    except (MonoidReduceError, MemoryError):
        raise
    except Exception as error:  # whatever another library raises of what it cannot hand over
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ArgumentError(
            detail=f"{name} was given {shown(array)}, which DLPack does not hand over: {said}",
            fix="Convert it to a numpy array or a tensor first",
        ) from error


def _from_numpy(array: numpy.ndarray, name: str) -> Tensor:
    check_mapped(array)
    masked = sys.modules.get("numpy.ma")  # imported when the first such array is made
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise ArgumentError(
            detail=f"{name} is a masked array, {shown(array.data)}, and the mask would be lost",
            fix="Fill it first, as in array.filled(0), or leave the masked entries out",
        )
    kind = array.dtype
    if kind.name == "bfloat16":  # numpy knows it through ml_dtypes; torch knows it itself
        return _from_numpy(array.view(numpy.int16), name).view(torch.bfloat16)
    check_type(array, name)
    if not kind.isnative:
        array = array.astype(kind.newbyteorder("="))
    if kind.name in _WIDER:
        if kind.name == "uint64" and array.size and int(array.max()) >= 2**63:
            raise DTypeError(
                detail=f"{name} is {shown(array)} and holds {int(array.max())}, which torch has no integer for",
                fix="Give numbers below 2**63",
            )
        return torch.from_numpy(array.astype(_WIDER[kind.name]))
    size = array.itemsize
    if not array.flags.aligned or any(s < 0 or s % size for s in array.strides):
        array = numpy.array(array)  # torch knows neither steps backwards nor parts of numbers
    return torch.from_numpy(array if array.flags.writeable else numpy.asarray(_Writeable(array)))


class _Writeable:
    """Read-only memory under another flag: torch would warn of it, but nothing of ours writes to an argument."""

    def __init__(self, array: numpy.ndarray):
        self.array = array  # which holds the memory
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def check_type(array: numpy.ndarray, name: str) -> None:
    """Raise DTypeError for an array of what torch has no numbers for: texts, dates, objects, long doubles."""
    kind = array.dtype
    try:
        torch.from_numpy(numpy.empty(0, kind.newbyteorder("=")))
    except (TypeError, ValueError):
        raise DTypeError(
            detail=f"{name} is {shown(array)}, and torch has no type for {kind.name} ({kind.str})",
            fix="Convert it to numbers that torch has, as in array.astype('float32')",
        ) from None


def check_mapped(array: Any) -> None:
    """Raise StreamError if a memory-mapped file was truncated: reading past its end would kill the process (SIGBUS)."""
    mapped = getattr(array, "_mmap", None)
    if mapped is None or not isinstance(array, numpy.memmap):
        return
    needed = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + len(mapped)
    if mapped.size() < needed:
        raise StreamError(
            detail=f"{array.filename} has been cut short while it was read: it has {mapped.size()} bytes, "
            f"and had at least {needed}",
            fix="Write it again, and let nobody change it meanwhile",
        )


def to_numpy(result: Any) -> Any:
    """A result with numpy arrays over the memory of its tensors; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(result, Tensor):
        result = result.detach()
        return (result.float() if result.dtype is torch.bfloat16 else result).numpy()
    if isinstance(result, Mapping):
        return type(result)({key: to_numpy(value) for key, value in result.items()})  # type: ignore[call-arg]
    if isinstance(result, (tuple, list)):
        inside = [to_numpy(value) for value in result]
        return type(result)(*inside) if hasattr(result, "_fields") else type(result)(inside)
    if hasattr(result, "asdict") and hasattr(type(result), "fields"):  # an element of a monoid
        return type(result)(**{name: to_numpy(value) for name, value in result.asdict().items()})
    return result
