"""Read safetensors files lazily, and write them atomically from one process or several.

In: a path, or named tensors. Out: lazy tensors, or a directory that other libraries load.
"""

from .atomic import new_directory as new_directory
from .atomic import new_file as new_file
from .read import FileTensor as FileTensor
from .read import tensors_and_aliases as tensors_and_aliases
from .read import tensors_in as tensors_in
from .save import save_tensors as save_tensors
from .which_files import INDEX as INDEX
from .which_files import INDEX_SUFFIX as INDEX_SUFFIX
from .which_files import SINGLE as SINGLE
