"""Open any checkpoint, load it into a tree, and convert one file format into another.

In: a path and a tree of shapes. Out: sharded arrays, each process reading only what it owns.
"""

from .adam import adam_from as adam_from
from .adam import load_adam as load_adam
from .convert_file import check_copy as check_copy
from .convert_file import torch_state_dict as torch_state_dict
from .convert_file import write_checkpoint as write_checkpoint
from .load_into import checked_dtype as checked_dtype
from .load_into import load_into as load_into
from .load_into import tensors_from as tensors_from
from .open import CheckpointForm as CheckpointForm
from .open import open_checkpoint as open_checkpoint
from .open import register_checkpoint_form as register_checkpoint_form
