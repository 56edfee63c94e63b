"""Save and restore checkpoints of training state with Orbax: atomic, unpadded, with digests.

In: a tree of sharded arrays and a directory. Out: numbered checkpoints, restored on any mesh.
Entry points use `Checkpoints`, and functions that list the checkpoints in a directory.
"""

from .checkpoints import Checkpoints as Checkpoints
from .digests import DESCRIPTION as DESCRIPTION
from .digests import read_description as read_description
from .directory import NoCheckpoint as NoCheckpoint
from .directory import drop_after as drop_after
from .directory import list_damaged as list_damaged
from .directory import list_steps as list_steps
from .directory import list_together as list_together
from .directory import say_all_damaged as say_all_damaged
