"""The task of the training job: find the body of a function by its docstring.

In: Python sources. Out: pairs, token batches, the loss, and retrieval metrics.
"""

from .examples import Examples as Examples
from .examples import load_examples as load_examples
from .examples import training_batches as training_batches
from .metrics import Retrieval as Retrieval
from .metrics import embed_in_batches as embed_in_batches
from .metrics import retrieval_scores as retrieval_scores
from .packaged_checkpoint import packaged_checkpoint as packaged_checkpoint
from .retrieval import AXES as AXES
from .retrieval import NODE_AXES as NODE_AXES
from .retrieval import Metrics as Metrics
from .retrieval import Params as Params
from .retrieval import contrastive_loss as contrastive_loss
from .retrieval import make_embed as make_embed
from .tokens import PairTokens as PairTokens
from .tokens import abstract_tokens as abstract_tokens
