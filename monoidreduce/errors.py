"""Every mistake a user can make, one class each.

A class carries its message as data: ``what`` went wrong (filled in with details) and ``fix``, the sentence that says
what to do. Inner code raises the bare cause; the one public call adds the op's name, its arguments' shapes and the
user's source line with :meth:`MonoidReduceError.at`. This module imports nothing.
"""


class MonoidReduceError(Exception):
    """The root of everything raised on purpose; catch it to catch all.

    >>> import torch, monoidreduce as mr
    >>> with mr.use(engine="reference"):
    ...     try:
    ...         mr.ops.knn(torch.zeros(2, 3), torch.zeros(4, 5), 1)
    ...     except mr.MonoidReduceError as error:
    ...         print(type(error).__name__)
    ShapeError
    """

    what = "{detail}"
    fix = ""

    def __init__(self, *, fix: str = "", **details: object):
        self.details = details
        self.place = ""
        text = self.what.format_map(_Details(details))
        advice = (fix or self.fix).format_map(_Details(details))
        self.text = f"{text}{'' if text.endswith('?') else '.'} {advice}" if advice else text
        super().__init__(self.text)

    def __reduce__(self) -> tuple:
        """Errors cross processes (a DataLoader's worker, a rank): by class, text and place."""
        return _restore_error, (type(self), self.text, self.place)

    def at(self, place: str) -> "MonoidReduceError":
        """Add where it happened (once): the op, its arguments and the user's line."""
        if not self.place:
            self.place = place
            self.args = (f"{self.text}\n  {place}",)
        return self


def _restore_error(cls: type[MonoidReduceError], text: str, place: str) -> MonoidReduceError:
    error = cls.__new__(cls)
    error.details, error.text, error.place = {}, text, ""
    error.args = (text,)
    return error.at(place) if place else error


class _Details(dict):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


def shown(value: object) -> str:
    """A value in a message: an array by its type and shape, never its numbers; anything long is cut."""
    kind = type(value).__name__
    if hasattr(type(value), "shape") and hasattr(value, "dtype"):
        form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"  # type: ignore[attr-defined]
        return form if type(value).__module__.split(".")[0] in ("torch", "numpy") else f"{form} ({kind})"
    ours = type(value).__module__.startswith("monoidreduce.")  # symbols answer to every name that tensors have
    if hasattr(type(value), "shape") and not ours:  # a table, whose columns have types of their own
        return f"a {kind} {list(value.shape)}"  # type: ignore[attr-defined]
    if not ours and (hasattr(type(value), "__dlpack__") or hasattr(type(value), "__array__")):
        return f"a {kind} of {len(value)}" if hasattr(value, "__len__") else f"a {kind}"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple, dict, set)):
        inside = value.values() if isinstance(value, dict) else value
        if len(value) > 8 or any(hasattr(type(v), "__len__") and not isinstance(v, str) for v in inside):
            return f"a {kind} of {len(value)}"
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:200] + '...'} ({kind})"


class DeclarationError(MonoidReduceError, TypeError):
    """A parameter of an op, or a field of a monoid, is declared in a way we do not know.

    >>> import torch, monoidreduce as mr
    >>> mr.op(lambda x: mr.sum(x))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.DeclarationError: <lambda>: parameter x has no annotation. Annotate with ...
    """

    fix = 'Annotate with Row["f"], Col["f"], Row, Col, mr.Batch, mr.Pair, mr.Table["n"], float, int or bool'


class ArgumentError(MonoidReduceError, TypeError):
    """A call passes too few, too many or the wrong kind of arguments.

    >>> import torch, monoidreduce as mr
    >>> mr.ops.attention(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4, 1), window="wide")
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ArgumentError: window was given 'wide'. Give a whole number from 0, or a pair ...
    """


class ShapeError(MonoidReduceError, ValueError):
    """A tensor's rank or size does not fit its declaration, or two that should agree differ.

    >>> import torch, monoidreduce as mr
    >>> mr.ops.mlp(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(4, 1))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ShapeError: x has 3 features "d", but p has 5. Equal letters must be equal sizes; ...
    """


class DTypeError(MonoidReduceError, TypeError):
    """Inputs mix floating types, or have a type that the op cannot use.

    >>> import torch, monoidreduce as mr
    >>> mr.ops.mlp(torch.zeros(2, 3), torch.zeros(4, 3).half(), torch.zeros(4, 1))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.DTypeError: arguments mix floating types: x is float32, p is float16, q is float32. ...
    """

    fix = "Cast them to one floating type first, with .to(x.dtype), or .astype(x.dtype) of a numpy array"


class DeviceError(MonoidReduceError, ValueError):
    """Inputs live on different devices.

    >>> import torch, monoidreduce as mr
    >>> mr.ops.mlp(torch.zeros(2, 3), torch.zeros(4, 3, device="meta"), torch.zeros(4, 1))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.DeviceError: arguments are on different devices: x on cpu, p on meta, q on cpu. ...
    """

    fix = "Move them to one device first (for example with .to(x.device))"


class TraceError(MonoidReduceError, TypeError):
    """The body does something that cannot be written down as one program for all pairs.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def positive(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.sum(x @ y if x @ y > 0 else 0.0)
    >>> positive(torch.zeros(2, 3), torch.zeros(4, 3))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.TraceError: a Python if, ... needs the value of ..., which differs from pair to pair. ...
    """


class UnknownFunctionError(TraceError):
    """A torch function or method that the pair language does not have.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def odd(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.sum(torch.i0(x @ y))
    >>> odd(torch.zeros(2, 3), torch.zeros(4, 3))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.UnknownFunctionError: the pair language has no i0...
    """

    what = "the pair language has no {name}"
    fix = "Did you mean {nearest}? Otherwise write it with the functions it has (monoidreduce.functions() lists them)"


class ImpureError(TraceError):
    """The body gave two different programs when traced twice, or kept a symbol of an earlier trace.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def noisy(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.sum(x @ y) * torch.rand(()).item()
    >>> noisy(torch.zeros(2, 3), torch.zeros(4, 3))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ImpureError: noisy gave two different programs when traced twice...
    """

    fix = "The body is traced once, not run per pair: pass changing values as arguments, and keep no symbols"


class UnreducedError(MonoidReduceError, ValueError):
    """A value per pair was returned, or a vector per pair was used where a number is needed.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def differences(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.max(x - y)
    >>> differences(torch.zeros(2, 3), torch.zeros(4, 3))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.UnreducedError: mr.max folds one number per pair, but was given a vector...
    """


class NotReducedError(UnreducedError):
    """The body never reduces over columns or rows.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def forgotten(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return x * 2
    >>> forgotten(torch.zeros(2, 3), torch.zeros(4, 3))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.NotReducedError: the body of forgotten has no reduction...
    """

    what = "the body of {name} has no reduction, so there is nothing to fold"
    fix = "Return a reduction such as mr.sum(...), mr.softmax_mean(logit, value) or mr.max(...)"


class TopKError(MonoidReduceError, ValueError):
    """topk asks for more elements than there are.

    >>> import torch, monoidreduce as mr
    >>> mr.ops.knn(torch.zeros(2, 3), torch.zeros(4, 3), 5)
    Traceback (most recent call last):
    ...
    monoidreduce.errors.TopKError: topk asks for k = 5 of only 4 columns. Ask for at most 4, ...
    """

    what = "topk asks for k = {k} of only {size} {axis}"
    fix = "Ask for at most {size}, or give more {axis}"


class LabelError(MonoidReduceError, IndexError):
    """A class label lies outside the columns.

    >>> import torch, monoidreduce as mr
    >>> mr.ops.linear_cross_entropy(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([4]))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.LabelError: label 4 at position 0 is out of range: labels must be from 0 to 3...
    """

    what = "label {label} at position {position} is out of range: labels must be from 0 to {last}"
    fix = "Mend the label, or mark rows to skip with ignore_index"


class TableError(MonoidReduceError, IndexError):
    """An index of ``mr.lookup`` is outside of its table, at a pair that counts.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def near(x: mr.Row, y: mr.Col, bias: mr.Table["n"]):
    ...     return mr.sum(mr.lookup(bias, (mr.row_index - mr.col_index).abs()))
    >>> near(torch.zeros(4), torch.zeros(4), torch.zeros(3))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.TableError: an index of mr.lookup is out of range at 2 pairs: the table "n" has 3 entries, ...
    """

    fix = "Give a larger table, leave these pairs out with torch.where, or look up with clamp=True"


class ColumnListError(MonoidReduceError, ValueError):
    """The numbers of a domain (``cols=``) are no lists of columns: out of range, negative, or offsets that decrease.

    >>> import torch, monoidreduce as mr
    >>> mr.edges(torch.tensor([0, 2]), torch.tensor([0, 4])).check(rows=1, cols=4)
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ColumnListError: index[1] is 4, but columns are numbered from 0 to 3. Give numbers ...
    """


class NoGradientError(MonoidReduceError, RuntimeError):
    """A gradient was asked of something that has none.

    >>> import torch, monoidreduce as mr
    >>> class Steps(mr.Monoid):
    ...     v: mr.Scalar = 0.0
    ...     def combine(a, b):
    ...         return Steps(v=torch.floor(a.v) + torch.floor(b.v))
    >>> @mr.op
    ... def steps(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.reduce(Steps, v=x @ y).v
    >>> steps(torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3)).sum().backward()
    Traceback (most recent call last):
    ...
    monoidreduce.errors.NoGradientError: a gradient was asked of Steps, whose combine has no derivative...
    """


class MonoidLawError(MonoidReduceError, AssertionError):
    """A monoid breaks a law; the message holds the smallest counterexample found.

    >>> import torch, monoidreduce as mr
    >>> class Minus(mr.Monoid):
    ...     v: mr.Scalar = 0.0
    ...     def combine(a, b):
    ...         return Minus(v=a.v - b.v)
    >>> mr.laws.check(Minus)
    Traceback (most recent call last):
    ...
    monoidreduce.errors.MonoidLawError: Minus breaks the law of associativity:...
    """

    what = "{monoid} breaks the law of {law}:\n{example}"


class EngineError(MonoidReduceError, ValueError):
    """An engine that does not exist or cannot run here was asked for.

    >>> import torch, monoidreduce as mr
    >>> mr.use(engine="steam").__enter__()
    Traceback (most recent call last):
    ...
    monoidreduce.errors.EngineError: mr.use names the engine 'steam', which does not exist. Use one of ...
    """


class ReferenceLimitError(EngineError):
    """The dense engine was asked to build a larger pair matrix than its limit allows.

    >>> import torch, monoidreduce as mr
    >>> with mr.use(engine="reference", limit=10):
    ...     mr.ops.maxsim(torch.zeros(4, 3), torch.zeros(5, 3))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ReferenceLimitError: the reference engine would build ...
    """

    what = "the reference engine would build {elements:,} pair elements, more than its limit of {limit:,}"
    fix = 'Use engine="eager", or allow it with mr.use(engine="reference", limit=None)'


class BudgetError(MonoidReduceError, MemoryError):
    """A memory budget is too small for any schedule.

    >>> import torch, monoidreduce as mr
    >>> with mr.budget("1KB"):
    ...     mr.ops.mlp(torch.zeros(9, 3), torch.zeros(9, 3), torch.zeros(9, 1))
    Traceback (most recent call last):
    ...
    monoidreduce.errors.BudgetError: a budget of 1000B holds no part of the pairs ... Give at least ...
    """

    what = "a budget of {given} holds no part of the pairs that this program could be run on"
    fix = "Give at least {least}"


class ShardError(MonoidReduceError, ValueError):
    """The ranks of a sharded call disagree: in shapes, types, numbers or the op itself. Raised on every one of them.

    >>> import torch, monoidreduce as mr
    >>> issubclass(mr.ShardError, ValueError)  # so it can be caught as one; docs/ranks.md has what raises it
    True
    """


class RankError(MonoidReduceError, RuntimeError):
    """A rank died, hung or left a sharded call; nothing is returned on any of the others.

    >>> import torch, monoidreduce as mr
    >>> issubclass(mr.RankError, RuntimeError)  # so it can be caught as one; docs/ranks.md has what raises it
    True
    """

    fix = "The group cannot be used again: start the ranks anew (torchrun --max-restarts does)"


class StreamError(MonoidReduceError, RuntimeError):
    """A stream of columns was used in a way that it cannot answer.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def total(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.sum(x @ y)
    >>> total.stream(torch.zeros(2, 3)).result()
    Traceback (most recent call last):
    ...
    monoidreduce.errors.StreamError: no columns have been folded...
    """


class ConvergenceError(MonoidReduceError, RuntimeError):
    """An iteration, such as ``mr.linalg.cg``, did not reach the tolerance it was given.

    >>> import torch, monoidreduce as mr
    >>> x = torch.linspace(0, 1, 100, dtype=torch.float64).unsqueeze(-1)
    >>> mr.linalg.cg(lambda v: mr.ops.kernel_sum(x, x, v), x[:, 0], ridge=1e-9, maxiter=3)
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ConvergenceError: not converged after 3 iterations: the residual is ... of b's size, ...
    """

    what = "not converged after {iterations} iterations: the residual{column} is {residual} of b's size, above {tol}"


class OutOfMemoryError(MonoidReduceError, RuntimeError, MemoryError):
    """Memory ran out, and again with a smaller plan; everything was released and no input was changed.

    >>> import monoidreduce as mr
    >>> issubclass(mr.OutOfMemoryError, MemoryError)  # so it can be caught as one
    True
    """

    what = "out of memory in a fold of {rows} rows and {cols} columns, also with less room for pairs: {reason}"
    fix = "Free memory, or give fewer rows or columns at a time{least}"


class CacheError(MonoidReduceError, ValueError):
    """A file of plans to import is not what it should be, or one to export cannot be written.

    >>> import monoidreduce as mr
    >>> mr.cache.import_("no such file.json")
    Traceback (most recent call last):
    ...
    monoidreduce.errors.CacheError: plans cannot be read from no such file.json: ...
    """


class CacheWarning(UserWarning):
    """Something of the cache on disk cannot be used: everything works without it, but is made or tuned again.

    >>> import monoidreduce as mr
    >>> issubclass(mr.CacheWarning, UserWarning)  # so it can be filtered as one
    True
    """


class ConvergenceWarning(UserWarning):
    """Iterations ended before they reached the tolerance that was given, and the result is what they had by then.

    >>> import monoidreduce as mr
    >>> issubclass(mr.ConvergenceWarning, UserWarning)  # so it can be filtered, or raised, as one
    True
    """


class FallbackWarning(UserWarning):
    """An engine has no kernel for something and another engine runs it: right, but slower.

    >>> import monoidreduce as mr
    >>> issubclass(mr.FallbackWarning, UserWarning)  # mr.use(strict=True) makes it an EngineError
    True
    """


__all__ = sorted(
    name for name, value in list(globals().items()) if isinstance(value, type) and not name.startswith("_")
)
