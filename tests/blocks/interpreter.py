"""Tests in Triton 3.6's interpreter (TRITON_INTERPRET=1), and what it does wrong or again and again, put right for them."""

import inspect
import math
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

ROOT = Path(__file__).parents[2]


# Nothing of ours: what a mutant changes is imported after the fork.
SERVER = """if True:
    import gc, os, sys
    import megatron.core.models.hybrid.hybrid_model, pytest, torch, transformers, triton.language
    gc.freeze()
    for line in sys.stdin:
        said, *words = line.rstrip().split(chr(9))
        if not (child := os.fork()):
            for fd in (1, 2):
                os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), fd)
            code = pytest.main(words)
            sys.stdout.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)"""


@cache
def server() -> subprocess.Popen:
    """Has imported torch and Megatron once, where kernels are interpreted, and forks for each file of tests."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def passes(*paths: str) -> str:
    """What pytest says of tests in the interpreter, in a process of its own, where all of them have passed."""
    with tempfile.NamedTemporaryFile("r") as said:
        asked = server()
        asked.stdin.write(
            "\t".join((said.name, "-v", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", *paths)) + "\n"
        )
        asked.stdin.flush()
        code, told = asked.stdout.readline(), said.read()
        assert code == "0\n", told[-5000:]
        return told


def mend(monkeypatch) -> None:
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    cast = interpreter.InterpreterBuilder.cast_impl

    def patched(tensor, scope):
        patch(tensor, scope)
        # NumPy 2.5 refuses int() of the arrays of one element that it holds.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    whole, launched = interpreter._patch_lang, interpreter._LangPatchScope()
    done, named = set(), {}

    def once(fn):
        # Each call of a function inside a kernel would look through all of triton.language anew.
        nonlocal launched
        if not launched._changes:  # nothing is under way: what was patched has been restored
            done.clear()
        if fn not in named:
            named[fn] = {id(v) for v in fn.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)}
        if named[fn] <= done:
            return interpreter._LangPatchScope()
        scope = whole(fn)
        launched = launched if done else scope
        done.update(named[fn])
        return scope

    of, known = interpreter._get_np_dtype, {}

    def of_elements(dtype):
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if element.__class__ is not tl.dtype:
            return of(dtype)
        if element.name not in known:
            known[element.name] = of(element)
        return known[element.name]

    shape, attribute = tl.tuple.__init__, tl.tuple.__getattr__

    def untyped(self, args, type=None):
        # A million shapes have types that nobody asks for.
        if type is None:
            self.values = list(args)
        else:
            shape(self, args, type)

    def asked(self, name):
        if name != "type":
            return attribute(self, name)
        self.type = tl.core._type_for_tuple_values(self.values)
        return self.type

    unwrap = tl.core._unwrap_if_constexpr

    def unwrapped(o):
        # Most are none, and no sequence of them.
        return unwrap(o) if isinstance(o, (tl.constexpr, list, tuple, tl.tuple)) else o

    block, checked, shapes = tl.block_type.__init__, {}, {}

    def of_known_shape(self, element_ty, shape):
        # Millions of types and tensors have a few shapes.
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in checked:
            block(self, element_ty, shape)
            checked[sizes] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = checked[sizes]

    def name(self, name):
        if name != "name":
            raise AttributeError(name)
        self.name = f"<{self.shape}, {self.element_ty}>"
        return self.name

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])
        self.numel, self.shape = shapes[sizes]

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot_of_values(self, a, b, *rest):
        # It multiplies the bit patterns of bf16 numbers.
        return dot(self, widened(a), widened(b), *rest)

    def rounding_cast(self, src, dst_type):
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return widened(src)
        # It cuts what bf16 does not hold off, where a GPU rounds to the nearest, of two the even one.
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        up = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), up), tl.bfloat16)

    monkeypatch.setattr(tl.tuple, "__init__", untyped)
    monkeypatch.setattr(tl.tuple, "__getattr__", asked)
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", unwrapped)
    monkeypatch.setattr(tl.block_type, "__init__", of_known_shape)
    monkeypatch.setattr(tl.block_type, "__getattr__", name, raising=False)
    monkeypatch.setattr(tl.block_type, "to_ir", lambda self, builder: self)
    monkeypatch.setattr(tl.tensor, "__init__", tensor)
    # Sums and products once more in 64 bits, for an assertion that is left out.
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
    monkeypatch.setattr(interpreter, "_patch_lang", once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", of_elements)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_values)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding_cast)
