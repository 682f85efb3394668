"""Triton's interpreter, with what it does again at every operation of a kernel done once. The operations are its own."""

import functools


def quicken(interpreter, patch):
    """Until the patch is undone."""
    quicken_calls(interpreter, patch)
    quicken_dtypes(interpreter, patch)
    quicken_types(interpreter.tl, patch)
    quicken_broadcasts(interpreter, patch)


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
    block_type, constexpr, types = tl.block_type, tl.constexpr, {}
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

    patch.setattr(block_type, "__new__", new)
    patch.setattr(block_type, "__init__", lambda self, element_ty, shape: None)
    patch.setattr(tl.tensor, "__init__", init)


def quicken_broadcasts(interpreter, patch):
    """Operands of the same shape go through all of it too."""
    semantic = type(interpreter.interpreter_semantic)
    slow = semantic.broadcast_impl_value

    def broadcast(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left is right or (left.is_block() and right.is_block() and list(left.shape) == list(right.shape)):
            return lhs, rhs
        return slow(self, lhs, rhs)

    patch.setattr(semantic, "broadcast_impl_value", broadcast)
