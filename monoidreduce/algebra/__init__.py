"""The algebra: what a monoid is, the catalogue of known ones, folding, and the laws a monoid must obey.

Imports torch, the standard library and the errors; no other package.
"""

from monoidreduce.algebra import catalogue as monoids
from monoidreduce.algebra import laws
from monoidreduce.algebra.fields import Domain, Field, Function, List, Matrix, Scalar, Vector
from monoidreduce.algebra.fold import fold
from monoidreduce.algebra.monoid import Monoid, dot, product

__all__ = [
    "Domain",
    "Field",
    "Function",
    "List",
    "Matrix",
    "Monoid",
    "Scalar",
    "Vector",
    "dot",
    "fold",
    "laws",
    "monoids",
    "product",
]
