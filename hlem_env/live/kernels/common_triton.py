# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""What kernels share: launches and, those of the cache, how programs divide work and wait for one another.

A kernel that reads and writes the same cell has one element a thread at least, since Triton repeats
loads in every warp otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.cache_state import SKETCH_MULTIPLIERS, SKETCH_SHIFT

PROGRAMS_PER_PROCESSOR = 2
MEETING: dict[str, Any] = {"num_warps": 8, "maxnreg": 96, "launch_cooperative_grid": True}
"""Options of kernels whose programs meet: all of them run at once, or the launch is refused."""
BESIDE: dict[str, Any] = {"num_warps": 4, "maxnreg": 128, "launch_cooperative_grid": True}
"""The same beside other work, one program a processor: what they leave of the registers is just
enough for kernels of the kind above."""

_FIRST = tl.constexpr(SKETCH_MULTIPLIERS[0])
_SECOND = tl.constexpr(SKETCH_MULTIPLIERS[1])
_SHIFT = tl.constexpr(SKETCH_SHIFT)


@triton.jit
def meet(arrived, times):
    """Wait for all programs to get here, for the `times`-th time; `arrived` counts from 0.

    What any of them wrote before is then seen by all.
    """
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release")
    everybody = times * tl.num_programs(0)
    while tl.atomic_add(arrived, 0, sem="acquire") < everybody:
        pass
    tl.debug_barrier()


@triton.jit
def my_share(total):
    """From where to where this program has elements: stretches in order of the programs."""
    size = tl.cdiv(tl.cdiv(total, tl.num_programs(0)), 32) * 32
    begin = tl.minimum(tl.program_id(0) * size, total)
    return begin, tl.minimum(begin + size, total)


@triton.jit
def before_me(sums, SPAN: tl.constexpr):
    """Of one number for every program, the sum over those before this one, and the sum over all."""
    lane = tl.arange(0, SPAN)
    values = tl.load(sums + lane, mask=lane < tl.num_programs(0), other=0)
    return tl.sum(tl.where(lane < tl.program_id(0), values, 0)), tl.sum(values)


@triton.jit
def sketch_cells(sketch, row, cells):
    """Addresses of a row's two cells, as `CacheState.cells`."""
    one = (row * _FIRST >> _SHIFT) & (cells - 1)
    two = (row * _SECOND >> _SHIFT) & (cells - 1)
    return sketch + one, sketch + cells + two


class Launcher:
    """Launches kernels; from the second time on without Triton's look at every argument.

    That look costs up to 50 us. It would always come to the same end: pointers are aligned to 16
    bytes, and sizes are not specialised or never change.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        stream: torch.cuda.Stream,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Launch on the stream; the options of a kernel with the same constants never change."""
        key = (id(kernel), constants)
        launcher = self._compiled.get(key)
        if launcher is None:
            with torch.cuda.stream(stream):
                compiled = kernel[(programs,)](*arguments, *constants, **options)
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = launcher
        numbers = [x.data_ptr() if type(x) is Tensor else x for x in arguments]
        run(
            programs, 1, 1, stream.cuda_stream, function, metadata, None, None, None,
            *numbers, *constants,
        )  # fmt: skip


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    options: dict[str, int],
    tensors: tuple[Tensor, ...],
    floats: tuple[float, ...],
    strides: tuple[int, ...],
    counts: tuple[int, ...],
    constants: tuple[int, ...],
) -> None:
    """Run a kernel whose parameters come in this order, compiled once for all that it depends on.

    Triton finds the compiled kernel anew at each launch, which takes the host longer than the device
    takes for a request with cached history. `counts` are what the kernel is not specialised for.
    """
    key = (
        id(kernel),
        tensors[0].device.index,
        *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors],
        strides,
        *[count < 2**31 for count in counts],
        constants,
        *options.values(),
    )
    arguments = (*tensors, *floats, *strides, *counts, *constants)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **options)
    else:
        compiled[grid](*arguments)


def span(programs: int) -> int:
    """Places for one number of every program."""
    return int(triton.next_power_of_2(programs))


def blocks(n: int, size: int) -> int:
    """Programs for n elements; `triton.cdiv` takes microseconds."""
    return -(-n // size)


def aligned(rows: Tensor) -> Tensor:
    """The same at an address that is a multiple of 16, which the kernels are compiled for."""
    return rows if rows.data_ptr() % 16 == 0 and rows.is_contiguous() else rows.clone()


_launchers: defaultdict[tuple[int | bool, ...], Launcher] = defaultdict(Launcher)


def launcher(device: torch.device, *numbers: int) -> Launcher:
    """For kernels that no object owns.

    Args:
        device: that they run on.
        numbers: arguments that may need 64 bits: a kernel is compiled for which of them do.
    """
    return _launchers[device.index, *[-(2**31) <= number < 2**31 for number in numbers]]
