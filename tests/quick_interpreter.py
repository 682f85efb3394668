"""Triton's interpreter, with what it does again at every operation of a kernel done once. The operations are its own."""

import functools
import inspect
import types

import numpy as np
import torch

from interpreter_plans import Plans


def quicken(interpreter, patch):
    """Until the patch is undone."""
    quicken_builtins(interpreter, patch)
    quicken_handles(interpreter, patch)
    quicken_calls(interpreter, patch)
    quicken_dtypes(interpreter, patch)
    quicken_types(interpreter.tl, patch)
    quicken_broadcasts(interpreter, patch)
    quicken_operands(interpreter, patch)
    quicken_overflows(interpreter, patch)
    quicken_comparisons(interpreter.tl, patch)
    quicken_launches(interpreter, patch)


def quicken_builtins(interpreter, patch):
    """Every function of the language is called through two others, which copy its arguments and check that one is there."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    checks = core.builtin(lambda _semantic: None).__code__
    planned = Plans(interpreter).wrappers()

    def patch_attr(obj, name, member, builder, *scope):
        member = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        call = planned.get((obj, name), lambda slow: slow)(call)
        (scope[0].set_attr if scope else setattr)(obj, name, call)

    patch.setattr(interpreter, "_patch_attr", patch_attr)


def quicken_handles(interpreter, patch):
    """What holds an array is a dataclass, which calls two functions to see that the array is not too wide."""
    handle, scalar = interpreter.TensorHandle, type(interpreter.tl.float32)

    def init(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is scalar and 8 * data.itemsize > dtype.primitive_bitwidth:
            self.__post_init__()

    patch.setattr(handle, "__init__", init)


def quicken_calls(interpreter, patch):
    """The language is patched for every launch, and again for every call of a function inside a kernel: here once, for good."""
    patched, patch_lang = set(), interpreter._patch_lang

    class Kept:
        def restore(self):
            pass

    def patch_once(fn):
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch_lang(fn)  # members that are patched already it leaves alone
        return Kept()

    def call(self, *args, **kwargs):
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)


def quicken_dtypes(interpreter, patch):
    """It makes a table of all dtypes whenever it looks one up."""
    scalar, known = type(interpreter.tl.float32), functools.cache(interpreter._get_np_dtype)

    def np_dtype(dtype):
        element = dtype if type(dtype) is scalar else dtype.element_ty
        block = type(dtype) in (scalar, interpreter.tl.block_type) and type(element) is scalar
        return known(element) if block else known.__wrapped__(dtype)  # others cannot be keys

    patch.setattr(interpreter, "_get_np_dtype", np_dtype)


def quicken_types(tl, patch):
    """A block's type is checked and named, and a tensor's shape made of constants, whenever something is computed."""
    block_type, constexpr, types, unwrap = tl.block_type, tl.constexpr, {}, tl.core._unwrap_if_constexpr
    begin, fill = block_type.__init__, tl.tensor.__init__

    def new(cls, element_ty, shape):
        sizes = [s.value if isinstance(s, constexpr) else s for s in shape]
        key = (cls, type(element_ty), element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in types:
            made = object.__new__(cls)
            begin(made, element_ty, shape)  # refuses what is no shape
            types[key] = made
        return types[key]

    def init(self, handle, type):
        known = type.__dict__.get("of_its_tensors")
        if known is None:
            fill(self, handle, type)
            type.of_its_tensors = self.numel, self.dtype, self.shape
            return
        self.handle, self.type = handle, type
        self.numel, self.dtype, self.shape = known

    pointer_type, point = tl.pointer_type, tl.pointer_type.__init__

    def new_pointer(cls, element_ty, address_space="global", const=False):
        element_ty = unwrap(element_ty)
        if type(element_ty) is not type(tl.float32):
            return object.__new__(cls)
        key = (cls, element_ty.name, unwrap(address_space), unwrap(const))
        if key not in types:
            types[key] = object.__new__(cls)
            point(types[key], element_ty, address_space, const)
        return types[key]

    def init_pointer(self, *args, **named):
        if not hasattr(self, "const"):
            point(self, *args, **named)

    patch.setattr(pointer_type, "__new__", new_pointer)
    patch.setattr(pointer_type, "__init__", init_pointer)
    patch.setattr(block_type, "__new__", new)
    patch.setattr(block_type, "__init__", lambda self, element_ty, shape: None)
    patch.setattr(tl.tensor, "__init__", init)


def quicken_broadcasts(interpreter, patch):
    """Operands of the same shape go through all of it too, and a number's new type through the types of a compiler."""
    semantic = type(interpreter.interpreter_semantic)
    slow = semantic.broadcast_impl_value

    def spread(self, number, block):
        wide = block.with_element_ty(number.type.scalar)
        return self.make_tensor(self.builder.create_splat(wide, number.handle), wide)

    def broadcast(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if left.is_block() != right.is_block():
            return (lhs, spread(self, rhs, left)) if left.is_block() else (spread(self, lhs, right), rhs)
        if not left.is_block() or list(left.shape) == list(right.shape):
            return lhs, rhs
        return slow(self, lhs, rhs)

    patch.setattr(semantic, "broadcast_impl_value", broadcast)


def quicken_operands(interpreter, patch):
    """Operands of one dtype, pointers with offsets, and tensors with small numbers go through all rules of promotion."""
    tl, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    slow, same = semantic.binary_op_type_checking_impl, {tl.float32, tl.int1, tl.int32, tl.int64}
    numbers = {tl.float32: (int, float), tl.int32: (int,), tl.int64: (int,)}  # which leave a dtype as it is
    tensor, pointer, small = tl.tensor, tl.pointer_type, 2**31

    def stays(dtype, number):
        kind = type(number)
        return type(dtype) is not pointer and kind in numbers.get(dtype, ()) and (kind is float or abs(number) < small)

    def check(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        left, right = type(lhs), type(rhs)
        if left is tensor and type(lhs.dtype) is pointer and allow_lhs_ptr:
            if right is int or (right is tensor and rhs.dtype in (tl.int32, tl.int64)):
                return self.broadcast_impl_value(lhs, self.to_tensor(rhs))
        elif left is right is tensor:
            if lhs.dtype is rhs.dtype and lhs.dtype in same:
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and left is tensor and stays(lhs.dtype, rhs):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
        elif arithmetic_check and right is tensor and stays(rhs.dtype, lhs):
            return self.broadcast_impl_value(self.scalar_constant(lhs, dtype=rhs.dtype), rhs)
        return slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    patch.setattr(semantic, "binary_op_type_checking_impl", check)


def quicken_overflows(interpreter, patch):
    """Whether a sum, difference or product is within int32 is computed by ten operations, and looked at by nobody who does not debug."""
    semantic = type(interpreter.interpreter_semantic)
    slow = semantic.binary_op_sanitize_overflow_impl

    def sanitize(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            slow(self, lhs, rhs, binary_op)

    patch.setattr(semantic, "binary_op_sanitize_overflow_impl", sanitize)


def quicken_comparisons(tl, patch):
    """A dtype is mostly compared with itself, and what may be a constant mostly is a tensor or a number."""
    equal, unwrap, constexpr = tl.dtype.__eq__, tl.core._unwrap_if_constexpr, tl.constexpr
    plain = {tl.tensor, int, float, bool, str, type(None)}

    def unwrap_quickly(o):
        kind = type(o)
        return o if kind in plain else o.value if kind is constexpr else unwrap(o)

    patch.setattr(tl.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_quickly)


def quicken_launches(interpreter, patch):
    """At every launch a kernel is asked for its parameters, three times, and a type is read from every argument's name."""
    argspec, parameters, constants = functools.cache(inspect.getfullargspec), {}, {}
    executor, pointers = interpreter.GridExecutor, {}
    begin, convert = executor.__init__, interpreter._implicit_cvt

    def call_args(fn, *args, **kwargs):
        if fn not in parameters:
            signature = inspect.signature(fn).parameters.values()
            parameters[fn] = (
                [p.name for p in signature],
                {p.name: p.default for p in signature if p.default is not p.empty},
            )
        names, defaults = parameters[fn]
        assert len(args) <= len(names), f"{fn.__name__} takes {len(names)} arguments, not {len(args)}"
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    def init(self, fn, arg_names, grid, pre_run_hooks=()):
        if fn in constants:
            self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
            self.constexprs = constants[fn]
        else:
            begin(self, fn, arg_names, grid, pre_run_hooks)
            constants[fn] = self.constexprs

    def convert_quickly(arg):
        if type(arg) is not torch.Tensor:
            return convert(arg)
        if arg.dtype not in pointers:
            pointers[arg.dtype] = convert(arg).dtype
        kind = pointers[arg.dtype]
        return interpreter.tl.tensor(interpreter.TensorHandle(np.array([arg.data_ptr()], dtype=np.uint64), kind), kind)

    known = types.SimpleNamespace(**{**vars(inspect), "getfullargspec": argspec, "getcallargs": call_args})
    patch.setattr(interpreter, "inspect", known)
    patch.setattr(interpreter.tl, "str_to_ty", functools.cache(interpreter.tl.str_to_ty))
    patch.setattr(interpreter, "_implicit_cvt", convert_quickly)
    patch.setattr(executor, "__init__", init)
    # Tensors are on the CPU already: there is nothing to copy to it, nor back.
    patch.setattr(executor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
    patch.setattr(executor, "_restore_args_dev", lambda *_: None)
