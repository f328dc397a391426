"""Operations on rows of WIDTH numbers, one in each lane of a few vector registers: entry [i, t] belongs to list t.

Each is a loop over rows; what it carries from row to row stays in registers. A row has more than one register, so that
the operations on one need not wait for those on another.
"""

from inspect import Parameter, Signature

from llvmlite import ir
from numba import types

from drm_triton.kernels.cpu.runtime.jit import intrinsic
from drm_triton.kernels.cpu.runtime.numba_private import nothing
from drm_triton.kernels.cpu.runtime.simd import FUSED, WIDTH, VectorBuilder


class RowBuilder(VectorBuilder):
    """Addresses arrays by row."""

    def __init__(self, context, builder, signature, args, names, element=None) -> None:
        super().__init__(context, builder, signature, args, names, element or ir.FloatType(), WIDTH)

    def place(self, row):
        """Offset of a row."""
        return self.builder.mul(row, self.i64(self.lanes))

    def read(self, array, row, kind=None):
        """Load a row."""
        return self.load(array, self.place(row), kind or self.vector)

    def write(self, vector, array, row):
        """Store a row."""
        self.store(vector, array, self.place(row))

    def constant(self, value):
        """Return a vector of equal constants."""
        return ir.Constant(self.vector, [float(value)] * self.lanes)

    def number(self, row):
        """Return the number of a row as a float in each lane."""
        return self.splat(self.builder.sitofp(row, self.element))

    def fused(self, a, b, c):
        """Return a * b + c."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=FUSED), c, flags=FUSED)

    @property
    def integers(self):
        """The type of a row of int32."""
        return ir.VectorType(ir.IntType(32), self.lanes)

    def absolute(self, x):
        """Return |x|."""
        bits = self.builder.bitcast(x, self.integers)
        bits = self.builder.and_(bits, ir.Constant(self.integers, [0x7FFFFFFF] * self.lanes))
        return self.builder.bitcast(bits, self.vector)


def row_operation(*names: str):
    """Define an operation on rows by a function of its RowBuilder; `names` are the arguments of the operation.

    Arrays come first, then integers, which are named `n` or begin with `row`: numbers of rows, or one of them. All
    numbers after them are float32.
    """
    integers = [name == "n" or name.startswith("row") for name in names]
    arrays = integers.index(True)
    numbers = [types.int64 if integer else types.float32 for integer in integers[arrays:]]

    def define(body):
        def operation(context, *arguments):
            def build(context, builder, signature, args):
                body(RowBuilder(context, builder, signature, args, names))
                return nothing(context)

            return types.none(*arguments[:arrays], *numbers), build

        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("context", *names)]
        operation.__signature__ = Signature(parameters)  # Numba would pass all arguments as one tuple
        return intrinsic(operation)

    return define


def lane_mask(at, vector):
    """Return the bits of a vector of booleans as an integer."""
    return at.builder.bitcast(vector, ir.IntType(at.lanes))


@intrinsic
def any_above(context, s, row, limit, row_limit):
    """Return whether a row of s is above a row of `limit` in any lane."""

    def build(context, builder, signature, args):
        at = RowBuilder(context, builder, signature, args, ("s", "row", "limit", "row_limit"))
        above = builder.fcmp_ordered(">", at.read("s", at["row"]), at.read("limit", at["row_limit"]))
        return builder.icmp_unsigned("!=", lane_mask(at, above), ir.Constant(ir.IntType(at.lanes), 0))

    return types.boolean(s, types.int64, limit, types.int64), build


@row_operation("s", "largest", "n", "row")
def insert_row(at):
    """Insert a row into the n largest so far, which descend; the last of them goes."""
    builder = at.builder

    def step(k, carried):
        score, other = carried[0], at.read("largest", k)
        above = builder.fcmp_ordered(">", score, other)
        at.write(builder.select(above, score, other), "largest", k)
        return [builder.select(above, other, score)]

    at.loop(at["n"], 1, [at.read("s", at["row"])], step)
