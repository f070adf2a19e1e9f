"""Arrays without reference counts, for numba kernels with small helper functions.

Numba counts references of an array, atomically, at every function that it is handed to. In a kernel
that calls a dozen helpers per request this takes more time than the work. The arrays a kernel was
called with outlive the call, so the kernel may lend them to its helpers uncounted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic  # called with the array alone; the typing context is numba's
def _borrowed(typing_context: Any, array: Any) -> Any:
    """The same array, not counted. It must not outlive the one it was made of."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        view = context.make_array(array)(context, builder, args[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)  # type: ignore[no-untyped-call]
        return view._getvalue()

    return array(array), codegen


borrowed: Any = _borrowed
