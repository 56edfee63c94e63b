"""Pallas kernels for the wire formats: quantize, dequantize, and the collectives made of them.

Each operation has its meaning in `jax.numpy`, a kernel, and one dispatcher that takes the first
implementation able to run. Installed as `jaxzero.pallas_kernels`; no kernel yet.
"""

if __name__ != "jaxzero.pallas_kernels":
    raise ImportError(
        f"This package is a part of jaxzero and was imported as {__name__!r}. Write "
        "`from jaxzero import pallas_kernels`, and do not put the folder that holds it on "
        "`sys.path` by hand."
    )
