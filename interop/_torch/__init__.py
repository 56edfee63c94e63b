"""Read files of `torch.save`, FSDP (DCP) and DeepSpeed, without PyTorch and without running code.

In: a path. Out: a `Checkpoint` of lazy tensors, with the moments of Adam.
"""

from .dcp import METADATA as METADATA
from .dcp import open_dcp as open_dcp
from .deepspeed import is_deepspeed as is_deepspeed
from .deepspeed import is_part_of_deepspeed as is_part_of_deepspeed
from .deepspeed import open_deepspeed as open_deepspeed
from .moments import ModelOrder as ModelOrder
from .moments import Origin as Origin
from .moments import parameters_in as parameters_in
from .state_dict import INDEX as INDEX
from .state_dict import WEIGHTS as WEIGHTS
from .state_dict import open_torch_file as open_torch_file
from .state_dict import open_torch_parts as open_torch_parts
from .state_dict import read_optimizer as read_optimizer
from .unpickle import DTYPES as DTYPES
