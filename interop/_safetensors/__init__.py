"""Read safetensors files lazily, and write them atomically from one process or several.

In: a path, or named tensors. Out: lazy tensors, or a directory that other libraries load.
"""

from .read import INDEX as INDEX
from .read import INDEX_SUFFIX as INDEX_SUFFIX
from .read import SINGLE as SINGLE
from .read import tensors_and_aliases as tensors_and_aliases
from .read import tensors_in as tensors_in
from .write import save_tensors as save_tensors
