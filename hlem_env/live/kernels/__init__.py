"""Kernels of the live node: references that define results, and their Triton forms."""
