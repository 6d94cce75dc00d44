"""What Triton 3.6's interpreter (TRITON_INTERPRET=1) does wrong, put right for a test."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend(monkeypatch) -> None:
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    cast = interpreter.InterpreterBuilder.cast_impl

    def patched(tensor, scope):
        patch(tensor, scope)
        # NumPy 2.5 refuses int() of the arrays of one element that it holds.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(x):
        if x.dtype != tl.bfloat16:
            return x
        values = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view("float32")
        return interpreter.TensorHandle(values, tl.float32)

    def dot_of_values(self, a, b, *rest):
        # It multiplies the bit patterns of bf16 numbers.
        return dot(self, widened(a), widened(b), *rest)

    def rounding_cast(self, src, dst_type):
        # It cuts what bf16 does not hold off, where a GPU rounds to the nearest, of two the even one.
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        up = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), up), tl.bfloat16)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_values)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding_cast)
