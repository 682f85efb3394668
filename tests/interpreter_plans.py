"""Results of Triton's interpreter without its way to them: the types of operands decide about all but the data.

The first call of a function with operands of some types goes through the interpreter. What it returns has the type that
the result of every later such call has, so for those numpy alone is asked. Operands of unusual types always go the whole way.
"""

import functools

import numpy as np

# What numpy computes for the operators of tensors, and of which dtypes both operands may be.
NUMBERS = ("fp32", "int32", "int64")
OPERATORS = {
    "add": (np.add, NUMBERS),
    "sub": (np.subtract, NUMBERS),
    "mul": (np.multiply, NUMBERS),
    "truediv": (np.divide, ("fp32",)),
    "and": (np.bitwise_and, ("int1", "int32")),
    "or": (np.bitwise_or, ("int1", "int32")),
    "lt": (np.less, NUMBERS),
    "le": (np.less_equal, NUMBERS),
    "gt": (np.greater, NUMBERS),
    "ge": (np.greater_equal, NUMBERS),
    "eq": (np.equal, NUMBERS),
    "ne": (np.not_equal, NUMBERS),
}
REVERSED = ("add", "sub", "mul", "truediv")
INTEGERS = {"int32", "int64"}
WHOLE = slice(None)


def is_small(number):
    return -(2**31) < number < 2**31


class Plans:
    """Wrappers of functions of Triton's language, each with a table of plans by the types of its operands.

    A type is known by its address. The plan keeps the type, so that no other comes to have this address.
    """

    def __init__(self, interpreter):
        self.tl, self.memory = interpreter.tl, interpreter._interpreter
        self.tensor, self.pointer = self.tl.tensor, self.tl.pointer_type
        self.scalar, self.handle = type(self.tl.float32), interpreter.TensorHandle
        self.builder = interpreter.InterpreterBuilder
        self.usual = self.builder.create_masked_load, self.builder.create_masked_store

    def wrappers(self):
        """Return what to wrap (function) by (owner, name)."""
        tensor, tl = self.tensor, self.tl
        found = {(tensor, f"__{name}__"): functools.partial(self.operator, *OPERATORS[name]) for name in OPERATORS}
        for name in REVERSED:
            found[tensor, f"__r{name}__"] = functools.partial(self.operator, *OPERATORS[name], swapped=True)
        found |= {(tensor, "to"): self.to, (tensor, "__getitem__"): self.getitem}
        for name in ("load", "store", "where", "arange", "full"):
            found |= {(module, name): getattr(self, name) for module in (tl, tl.core)}
        return found

    def form(self, result):
        """Everything of a tensor but its data."""
        return result.type, result.numel, result.dtype, result.shape, result.handle.dtype

    def make(self, data, form):
        made, held = object.__new__(self.tensor), object.__new__(self.handle)
        made.handle, made.type, made.numel, made.dtype, made.shape, held.dtype = held, *form
        held.data, held.attr = data, {}
        return made

    def is_plain(self, dtype):
        """Whether numpy has the dtype, and converts to it as the interpreter does."""
        tl = self.tl
        return type(dtype) is self.scalar and dtype not in (tl.bfloat16, tl.int1) and not dtype.is_fp8()

    def operator(self, ufunc, dtypes, slow, swapped=False):
        tensor, make, plans = self.tensor, self.make, {}

        def call(left, right):
            kind = type(right)
            if kind is tensor:
                key = id(left.type), id(right.type)
            elif kind is float or (kind is int and is_small(right)):
                key = id(left.type), kind
            else:
                return slow(left, right)
            known = plans.get(key)
            if known is None:
                result = slow(left, right)
                fits, itemsize = self.fit(ufunc, dtypes, left.dtype, right)
                plans[key] = fits, itemsize, self.form(result), left.type, getattr(right, "type", None)
                return result
            fits, itemsize, form, _, _ = known
            if not fits:
                return slow(left, right)
            a, b = left.handle.data, right.handle.data if kind is tensor else right
            if itemsize:
                return make(a + itemsize * (b.astype(np.uint64) if kind is tensor else np.uint64(b % 2**64)), form)
            return make(ufunc(b, a) if swapped else ufunc(a, b), form)

        return call

    def fit(self, ufunc, dtypes, own, right):
        """Return whether numpy alone gives an operator's result, and the bytes of an element if `own` is a pointer."""
        tl = self.tl
        theirs = right.dtype if type(right) is self.tensor else tl.int32 if type(right) is int else tl.float32
        if type(own) is self.pointer:
            return ufunc is np.add and theirs.name in INTEGERS, max(1, own.element_ty.primitive_bitwidth // 8)
        if own.name not in dtypes:
            return False, 0
        if type(right) is self.tensor:
            return own is theirs or {own.name, theirs.name} == INTEGERS, 0
        return own is not tl.int1 and (theirs is tl.int32 or own is tl.float32), 0

    def load(self, slow):
        tensor, make, plans, read = self.tensor, self.make, {}, self.memory.load
        builder, (usual, _) = self.builder, self.usual

        def call(at, mask=None, other=None, **hints):
            # A test may count loads.
            if builder.create_masked_load is not usual:
                return slow(at, mask, other, **hints)
            if type(mask) not in (tensor, type(None)) or (other is not None and (type(other) is tensor or other != 0)):
                return slow(at, mask, other, **hints)
            key = (id(at.type), None if mask is None else id(mask.type), other is None, *hints.items())
            known = plans.get(key)
            if known is None:
                result = slow(at, mask, other, **hints)
                zeros = np.zeros_like(result.handle.data)
                fits, every = result.dtype is not self.tl.int1, np.ones(zeros.shape, dtype=bool)
                plans[key] = fits, self.form(result), every, zeros, at.type, None if mask is None else mask.type
                return result
            fits, form, every, zeros, _, _ = known
            if not fits:
                return slow(at, mask, other, **hints)
            where, chosen = at.handle.data, every if mask is None else mask.handle.data
            if where.shape != zeros.shape:
                where = np.broadcast_to(where, zeros.shape)
            if chosen.shape != zeros.shape:
                chosen = np.broadcast_to(chosen, zeros.shape)
            return make(read(where, chosen, zeros, zeros.dtype), form)

        return call

    def store(self, slow):
        tensor, plans, write = self.tensor, {}, self.memory.store
        builder, (_, usual) = self.builder, self.usual

        def call(at, value, mask=None, **hints):
            if builder.create_masked_store is not usual:
                return slow(at, value, mask, **hints)
            if type(value) is not tensor or type(mask) is not tensor:
                return slow(at, value, mask, **hints)
            key = (id(at.type), id(value.type), id(mask.type), *hints.items())
            known = plans.get(key)
            if known is None:
                fits = at.dtype.element_ty is value.dtype and self.is_plain(value.dtype) and mask.dtype is self.tl.int1
                plans[key] = fits, at.type, value.type, mask.type
            if known is None or not known[0]:
                return slow(at, value, mask, **hints)
            where, data, chosen = at.handle.data, value.handle.data, mask.handle.data
            if data.shape != where.shape:
                data = np.broadcast_to(data, where.shape)
            if chosen.shape != where.shape:
                chosen = np.broadcast_to(chosen, where.shape)
            return write(where, data, chosen)

        return call

    def to(self, slow):
        make, plans = self.make, {}

        def call(given, dtype, *more, **options):
            if more or options or not isinstance(dtype, self.tl.dtype):
                return slow(given, dtype, *more, **options)
            key = id(given.type), id(dtype)
            known = plans.get(key)
            if known is None:
                result = slow(given, dtype)
                fits = self.is_plain(dtype) and (self.is_plain(given.dtype) or given.dtype is self.tl.int1)
                fits = fits or (given.dtype is self.tl.int64 and type(dtype) is self.pointer)
                plans[key] = fits, result is given, self.form(result), result.handle.data.dtype, given.type, dtype
                return result
            fits, same, form, kind, _, _ = known
            return given if same else make(given.handle.data.astype(kind), form) if fits else slow(given, dtype)

        return call

    def getitem(self, slow):
        make, plans = self.make, {}

        def call(given, slices):
            if type(slices) is not tuple or not all(s is None or (type(s) is slice and s == WHOLE) for s in slices):
                return slow(given, slices)
            key = (id(given.type), *[s is None for s in slices])
            known = plans.get(key)
            if known is None:
                result = slow(given, slices)
                plans[key] = given.type.is_block(), self.form(result), given.type
                return result
            return make(given.handle.data[slices], known[1]) if known[0] else slow(given, slices)

        return call

    def where(self, slow):
        tensor, make, plans, numbers = self.tensor, self.make, {}, (int, float)

        def call(chosen, left, right):
            given = [x for x in (left, right) if type(x) is tensor]
            rest = [x for x in (left, right) if type(x) in numbers and (type(x) is float or is_small(x))]
            if type(chosen) is not tensor or not given or len(given) + len(rest) < 2:
                return slow(chosen, left, right)
            key = (id(chosen.type), *[id(x.type) if type(x) is tensor else type(x) for x in (left, right)])
            known = plans.get(key)
            if known is None:
                result = slow(chosen, left, right)
                fits = chosen.dtype is self.tl.int1 and all(x.dtype is result.dtype for x in given)
                fits = fits and result.dtype.name in NUMBERS
                plans[key] = fits, self.form(result), result.handle.data.dtype, chosen.type, [x.type for x in given]
                return result
            fits, form, kind, _, _ = known
            if not fits:
                return slow(chosen, left, right)
            left, right = (x.handle.data if type(x) is tensor else kind.type(x) for x in (left, right))
            return make(np.where(chosen.handle.data, left, right), form)

        return call

    def arange(self, slow):
        made = {}

        def call(start, end):
            if type(start) is not int or type(end) is not int:
                return slow(start, end)
            if (start, end) not in made:
                result = slow(start, end)
                made[start, end] = result.handle.data, self.form(result)
            return self.make(*made[start, end])  # nothing writes to the data of a tensor

        return call

    def full(self, slow):
        made = {}

        def call(shape, value, dtype):
            if type(value) not in (int, float) or not all(type(n) is int for n in shape):
                return slow(shape, value, dtype)
            key = (id(dtype), repr(value), *shape)  # repr: 0.0 is equal to -0.0
            if key not in made:
                result = slow(shape, value, dtype)
                made[key] = result.handle.data, self.form(result), dtype
            return self.make(*made[key][:2])

        return call
