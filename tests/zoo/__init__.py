"""A zoo of models and losses for the oracle tests. `_case.py` says what a case is."""

from jaxzero._hlo import collectives, parse
from jaxzero._program import matrix_flops

from . import _collectives as _collectives
from . import _control as _control
from . import _custom_rules as _custom_rules
from . import _equinox as _equinox
from . import _flax as _flax
from . import _loops as _loops
from . import _numerics as _numerics
from . import _plain as _plain
from . import _remats as _remats
from . import _sequence as _sequence
from . import _weights as _weights
from ._case import AXES as AXES
from ._case import CASES as CASES
from ._case import THIRD_PARTY as THIRD_PARTY
from ._case import Case as Case
from ._case import normal as normal
from ._compare import arguments as arguments
from ._compare import assert_close as assert_close
from ._compare import check as check
from ._meshes import make_mesh as make_mesh
from ._meshes import preset_rotation as preset_rotation
from ._meshes import rotation as rotation
from ._quantised import PRESETS as PRESETS
from ._quantised import assert_within as assert_within
from ._quantised import check_quantised as check_quantised
from ._quantised import expected_and_sizes as expected_and_sizes

hlo = collectives  # reads from HLO what is sent, in which types, and how often
hlo_program = parse  # all instructions of HLO, and which computations they call
flops = matrix_flops  # of the matrix products of a function
