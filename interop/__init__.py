"""Between checkpoints of PyTorch models and trees of sharded JAX arrays, shard by shard.

Loading gives a tree whose leaves are tensors *in a file*; `zero.shard` reads from each only the
slices that its devices own. Saving writes the same files back, tensor by tensor. What lies between
names and layouts are rules, which both directions share. PyTorch is imported only by what hands
something to it, when called: `embed_with_transformers`, `torch_state_dict`, and `write_checkpoint`
in its forms.

    rules = [interop.Rule("kernel", "fc.weight", interop.Transpose())]
    loaded = interop.load_into({"kernel": shape}, "checkpoint", rules=rules)
    params = zero.shard(loaded)
    tensors = interop.tensors_from(params, rules, like=loaded)
    interop.save_tensors(tensors, "export", source="checkpoint")

`load_decoder`, `load_encoder` and their `export_` twins do this for the models of `jaxzero.models`.
`open_checkpoint` opens what PyTorch, FSDP and DeepSpeed write, `load_adam` takes over the state of
the optimizer, and `jz.from_deepspeed` the configuration.
"""

if __name__ != "jaxzero.interop":
    raise ImportError(
        f"This package is a part of jaxzero and was imported as {__name__!r}. Write "
        "`from jaxzero import interop`, and keep the folder that holds it off `sys.path`."
    )

from jaxzero._deepspeed_config import DeepSpeedRun as DeepSpeedRun
from jaxzero._loss_scale import DynamicScale as DynamicScale
from jaxzero._loss_scale import loss_scale_of as loss_scale_of
from jaxzero._loss_scale import scale_loss as scale_loss
from jaxzero.interop._adam import adam_from as adam_from
from jaxzero.interop._adam import load_adam as load_adam
from jaxzero.interop._adam import torch_state_dict as torch_state_dict
from jaxzero.interop._checkpoint import AdamMoments as AdamMoments
from jaxzero.interop._checkpoint import Checkpoint as Checkpoint
from jaxzero.interop._decoder import LoadedDecoder as LoadedDecoder
from jaxzero.interop._decoder import export_decoder as export_decoder
from jaxzero.interop._decoder import load_decoder as load_decoder
from jaxzero.interop._encoder import LoadedEncoder as LoadedEncoder
from jaxzero.interop._encoder import export_encoder as export_encoder
from jaxzero.interop._encoder import load_encoder as load_encoder
from jaxzero.interop._file_tensor import FileTensor as FileTensor
from jaxzero.interop._file_tensor import tensors_in as tensors_in
from jaxzero.interop._load_into import load_into as load_into
from jaxzero.interop._load_into import tensors_from as tensors_from
from jaxzero.interop._match import Proposal as Proposal
from jaxzero.interop._match import match as match
from jaxzero.interop._open import open_checkpoint as open_checkpoint
from jaxzero.interop._rules import Rule as Rule
from jaxzero.interop._save import save_tensors as save_tensors
from jaxzero.interop._steps import Flatten as Flatten
from jaxzero.interop._steps import Merge as Merge
from jaxzero.interop._steps import Split as Split
from jaxzero.interop._steps import Transpose as Transpose
from jaxzero.interop._steps import Unflatten as Unflatten
from jaxzero.interop._tensor import LazyTensor as LazyTensor
from jaxzero.interop._transformers import embed_with_transformers as embed_with_transformers
from jaxzero.interop._write import check_copy as check_copy
from jaxzero.interop._write import write_checkpoint as write_checkpoint
