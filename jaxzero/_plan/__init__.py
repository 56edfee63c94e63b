"""Decide when each weight is gathered, how long it is held, and when each gradient is reduced.

In: a `Block` (a traced program) and the layouts of those inputs that are sharded parameters. Out:
a `BlockPlan`, which is data: groups of gathers and reductions, each with the operation before which
it is sent. Runs nothing; `_execute` runs the plan, `_report` prints it.
"""

from . import instructions as instructions
from . import pipeline as pipeline
from .block_plan import BlockPlan as BlockPlan
from .block_plan import GatherGroup as GatherGroup
from .block_plan import LoopPlan as LoopPlan
from .emit import instructions_of as instructions_of
from .emit_loop import pipeline_of as pipeline_of
from .final_gradients import mark_final_gradients as mark_final_gradients
from .final_gradients import mark_sums as mark_sums
from .held_by_loops import most_held as most_held
from .hpz import mark_kept_slices as mark_kept_slices
from .hpz import slices_kept_in_program as slices_kept_in_program
from .lifetimes import Gather as Gather
from .loop_ends import cut_last_updates as cut_last_updates
from .loop_ends import separate_ends as separate_ends
from .param_uses import BlockUses as BlockUses
from .param_uses import ShardedParam as ShardedParam
from .param_uses import Stack as Stack
from .param_uses import View as View
from .param_uses import find_uses as find_uses
from .pipeline import Pipeline as Pipeline
from .plan import MovedRows as MovedRows
from .plan import Plan as Plan
from .plan import described_codecs as described_codecs
from .plan_step import ACTIONS as ACTIONS
from .plan_step import PlanStep as PlanStep
from .plan_step import region_name as region_name
from .schedule import make_plan as make_plan
