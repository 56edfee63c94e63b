"""Configuration, presets, and the layout of sharded trees: which dim of each leaf is split.

In: a `ZeroConfig`, a mesh and a pytree. Out: a `TreeLayout` with one layout for each leaf, and
stored arrays that carry their layout. Nothing here runs a collective.
"""

from .activations import Activations as Activations
from .config import CommSchedule as CommSchedule
from .config import Offload as Offload
from .config import ZeroConfig as ZeroConfig
from .config import without_defaults as without_defaults
from .hops import ErrorFeedback as ErrorFeedback
from .hops import GradientHop as GradientHop
from .hops import HpZ as HpZ
from .hops import PerAxis as PerAxis
from .hops import WeightDelta as WeightDelta
from .hops import WeightHop as WeightHop
from .hops import check_codec as check_codec
from .hops import check_integer as check_integer
from .layout import DimSharding as DimSharding
from .layout import LeafSpec as LeafSpec
from .layout import axes_of as axes_of
from .layout import in_memory as in_memory
from .layout import layout_of_leaf as layout_of_leaf
from .layout import layouts_by_preference as layouts_by_preference
from .layout import pad as pad
from .layout import split_dim as split_dim
from .layout import unpad as unpad
from .modules import mutated_leaf as mutated_leaf
from .modules import nnx_leaves as nnx_leaves
from .modules import other_variables as other_variables
from .modules import overwritten_leaves as overwritten_leaves
from .modules import plain_arrays as plain_arrays
from .modules import rng_leaves as rng_leaves
from .modules import trained_leaves as trained_leaves
from .modules import unboxed as unboxed
from .presets import ddp as ddp
from .presets import hsdp as hsdp
from .presets import pipeline as pipeline
from .presets import zero3 as zero3
from .presets import zeropp as zeropp
from .presets import zeropp4 as zeropp4
from .registry import Registry as Registry
from .stages import Stages as Stages
from .stored_array import StoredArray as StoredArray
from .stored_array import array_leaves as array_leaves
from .stored_array import data_of as data_of
from .stored_array import flatten as flatten
from .stored_array import is_array as is_array
from .stored_array import is_stored as is_stored
from .stored_array import named_leaves as named_leaves
from .stored_array import of_arrays as of_arrays
from .stored_array import path_endings as path_endings
from .stored_array import path_name as path_name
from .stored_array import spread_prefix as spread_prefix
from .tree import Static as Static
from .tree import TreeLayout as TreeLayout
from .tree import arrays_of as arrays_of
from .tree import lay_out as lay_out
from .tree import layout_as_stored as layout_as_stored
from .tree import offloaded as offloaded
from .tree import rebuild as rebuild
from .tree import statics_of as statics_of
from .tree import stored_leaf as stored_leaf
from .tree import unwrapped as unwrapped
from .ungathered import Ungathered as Ungathered
from .xla_options import compiler_options as compiler_options
from .xla_options import register_compiler_options as register_compiler_options
