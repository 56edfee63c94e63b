"""Decide when each weight is gathered, how long it is held, and when each gradient is reduced.

In: a `Block` and which of its inputs are sharded parameters. Out: a `Plan`, which is data: gathers
and reductions in buckets, with the operation that each comes before. Runs nothing.
"""

from .block_plan import BlockPlan as BlockPlan
from .block_plan import GatherGroup as GatherGroup
from .hpz import keep_slices as keep_slices
from .hpz import kept_inside as kept_inside
from .lifetimes import Gather as Gather
from .param_uses import BlockUses as BlockUses
from .param_uses import ShardedParam as ShardedParam
from .param_uses import Stack as Stack
from .param_uses import View as View
from .param_uses import find_uses as find_uses
from .plan import Plan as Plan
from .plan import PlanStep as PlanStep
from .plan import region_name as region_name
from .schedule import COSTLY as COSTLY
from .schedule import make_plan as make_plan
