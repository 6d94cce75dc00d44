"""What Triton 3.6's interpreter (TRITON_INTERPRET=1) does wrong, put right for a test."""

import triton.language as tl
from triton.runtime import interpreter


def mend(monkeypatch) -> None:
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

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

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_values)
