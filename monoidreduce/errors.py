"""Every mistake a user can make, one class each.

A class carries its message as data: ``what`` went wrong (filled in with details) and ``fix``, the sentence that says
what to do. Inner rooms raise the bare cause; the one public call adds the op's name, its arguments' shapes and the
user's source line with :meth:`MonoidReduceError.at`. This module imports nothing.
"""


class MonoidReduceError(Exception):
    """The root of everything raised on purpose; catch it to catch all."""

    what = "{detail}"
    fix = ""

    def __init__(self, *, fix: str = "", **details: object):
        self.details = details
        self.place = ""
        text = self.what.format_map(_Details(details))
        advice = (fix or self.fix).format_map(_Details(details))
        self.text = f"{text}. {advice}" if advice else text
        super().__init__(self.text)

    def __reduce__(self) -> tuple:
        """Errors cross processes (a DataLoader's worker, a rank): by class, text and place."""
        return _restored, (type(self), self.text, self.place)

    def at(self, place: str) -> "MonoidReduceError":
        """Add where it happened (once): the op, its arguments and the user's line."""
        if not self.place:
            self.place = place
            self.args = (f"{self.text}\n  {place}",)
        return self


def _restored(cls: type[MonoidReduceError], text: str, place: str) -> MonoidReduceError:
    error = cls.__new__(cls)
    error.details, error.text, error.place = {}, text, ""
    error.args = (text,)
    return error.at(place) if place else error


class _Details(dict):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


class DeclarationError(MonoidReduceError, TypeError):
    """A parameter of an op, or a field of a monoid, is declared in a way we do not know."""

    fix = 'Annotate with Row["f"], Col["f"], Row, Col, mr.Batch, mr.Pair, float, int or bool'


class ArgumentError(MonoidReduceError, TypeError):
    """A call passes too few, too many or the wrong kind of arguments."""


class ShapeError(MonoidReduceError, ValueError):
    """A tensor's rank or size does not fit its declaration, or two that should agree differ."""


class DTypeError(MonoidReduceError, TypeError):
    """Inputs mix floating types, or have a type that the op cannot use."""

    fix = "Cast them to one floating type first (for example with .to(x.dtype))"


class DeviceError(MonoidReduceError, ValueError):
    """Inputs live on different devices."""

    fix = "Move them to one device first (for example with .to(x.device))"


class TraceError(MonoidReduceError, TypeError):
    """The body does something that cannot be written down as one program for all pairs."""


class UnknownFunctionError(TraceError):
    """A torch function or method that the pair language does not have."""

    what = "the pair language has no {name}"
    fix = "Did you mean {nearest}? Otherwise write it with the functions it has (monoidreduce.functions() lists them)"


class ImpureError(TraceError):
    """The body gave two different programs when traced twice, or kept a symbol of an earlier trace."""

    fix = "The body is traced once, not run per pair: pass changing values as arguments, and keep no symbols"


class UnreducedError(MonoidReduceError, ValueError):
    """A value per pair was returned, or a vector per pair was used where a number is needed."""


class NotReducedError(UnreducedError):
    """The body never reduces over columns or rows."""

    what = "the body of {name} has no reduction, so there is nothing to fold"
    fix = "Return a reduction such as mr.sum(...), mr.softmax_mean(logit, value) or mr.max(...)"


class TopKError(MonoidReduceError, ValueError):
    """topk asks for more elements than there are."""

    what = "topk asks for k = {k} of only {size} {axis}"
    fix = "Ask for at most {size}, or give more {axis}"


class LabelError(MonoidReduceError, IndexError):
    """A class label lies outside the columns."""

    what = "label {label} at position {position} is out of range: labels must be from 0 to {last}"
    fix = "Mend the label, or mark rows to skip with ignore_index"


class NoGradientError(MonoidReduceError, RuntimeError):
    """A gradient was asked of something that has none."""


class MonoidLawError(MonoidReduceError, AssertionError):
    """A monoid breaks a law; the message holds the smallest counterexample found."""

    what = "{monoid} breaks the law of {law}:\n{example}"


class EngineError(MonoidReduceError, ValueError):
    """An engine that does not exist or cannot run here was asked for."""


class ReferenceLimitError(EngineError):
    """The dense engine was asked to build a larger pair matrix than its limit allows."""

    what = "the reference engine would build {elements:,} pair elements, more than its limit of {limit:,}"
    fix = 'Use engine="eager", or allow it with mr.use(engine="reference", limit=None)'


class BudgetError(MonoidReduceError, MemoryError):
    """A memory budget is too small for any schedule."""

    what = "a budget of {given} holds no part of the pairs that this program could be run on"
    fix = "Give at least {least}"


class ShardError(MonoidReduceError, ValueError):
    """The ranks of a sharded call disagree: in shapes, types, numbers or the op itself. Raised on every one of them."""


class RankError(MonoidReduceError, RuntimeError):
    """A rank died, hung or left a sharded call; nothing is returned on any of the others."""

    fix = "The group cannot be used again: start the ranks anew (torchrun --max-restarts does)"


class StreamError(MonoidReduceError, RuntimeError):
    """A stream of columns was used in a way that it cannot answer."""


class OutOfMemoryError(MonoidReduceError, RuntimeError, MemoryError):
    """Memory ran out, and again with a smaller plan; everything was released and no input was changed."""

    what = "out of memory in a fold of {rows} rows and {cols} columns, also with less room for pairs: {reason}"
    fix = "Free memory, or give fewer rows or columns at a time{least}"


class CacheError(MonoidReduceError, ValueError):
    """A file of plans to import is not what it should be, or one to export cannot be written."""


class CacheWarning(UserWarning):
    """Something of the cache on disk cannot be used: everything works without it, but is made or tuned again."""


class FallbackWarning(UserWarning):
    """An engine has no kernel for something and another engine runs it: right, but slower."""


__all__ = sorted(
    name for name, value in list(globals().items()) if isinstance(value, type) and not name.startswith("_")
)
