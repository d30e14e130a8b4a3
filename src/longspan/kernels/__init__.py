"""Triton kernels: the same mathematics, fast. Imported only when used."""
