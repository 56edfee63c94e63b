"""Convert between PyTorch checkpoints and trees of sharded JAX arrays, shard by shard.

In: a checkpoint directory or file, and a tree. Out: arrays on the devices that own them, or such a
directory. Jobs and scripts use it.

Loading returns a tree whose leaves are tensors *in a file*; `zero.shard` reads from each only the
slices that its devices own. Saving writes the same files, tensor by tensor. Rules map names and
layouts, and both directions use the same rules. PyTorch is imported only when one of these is
called: `compare`, `embed_with_transformers`, `torch_state_dict`, `write_checkpoint` with
`form="torch"` or `"dcp"`, and `adam()` of a checkpoint of the Trainer of transformers in
safetensors.

    rules = [interop.Rule("kernel", "fc.weight", interop.Transpose())]
    loaded = interop.load_into({"kernel": shape}, "checkpoint", rules=rules)
    params = zero.shard(loaded)
    tensors = interop.tensors_from(params, rules, like=loaded)
    interop.save_tensors(tensors, "export", source="checkpoint")

`load_decoder` and `load_encoder`, with `export_decoder` and `export_encoder`, do this for the
models of `jaxzero.models`. `open_checkpoint` opens checkpoints of PyTorch, FSDP and DeepSpeed,
`load_adam` loads the optimizer state, and `jz.from_deepspeed` translates the configuration.
"""

if __name__ != "jaxzero.interop":
    raise ImportError(
        f"This package is a part of jaxzero and was imported as {__name__!r}. Write "
        "`from jaxzero import interop`, and keep the folder that holds it off `sys.path`."
    )

from jaxzero._deepspeed import DeepSpeedRun as DeepSpeedRun
from jaxzero._deepspeed import DynamicScale as DynamicScale
from jaxzero._deepspeed import loss_scale_of as loss_scale_of
from jaxzero._deepspeed import scale_loss as scale_loss
from jaxzero.interop._compare import ComparedOutput as ComparedOutput
from jaxzero.interop._compare import Comparison as Comparison
from jaxzero.interop._compare import compare as compare
from jaxzero.interop._huggingface import DecoderFamily as DecoderFamily
from jaxzero.interop._huggingface import LoadedDecoder as LoadedDecoder
from jaxzero.interop._huggingface import LoadedEncoder as LoadedEncoder
from jaxzero.interop._huggingface import compare_with_transformers as compare_with_transformers
from jaxzero.interop._huggingface import decoder_family as decoder_family
from jaxzero.interop._huggingface import embed_with_transformers as embed_with_transformers
from jaxzero.interop._huggingface import export_decoder as export_decoder
from jaxzero.interop._huggingface import export_encoder as export_encoder
from jaxzero.interop._huggingface import load_decoder as load_decoder
from jaxzero.interop._huggingface import load_encoder as load_encoder
from jaxzero.interop._huggingface import register_decoder_family as register_decoder_family
from jaxzero.interop._load import CheckpointForm as CheckpointForm
from jaxzero.interop._load import adam_from as adam_from
from jaxzero.interop._load import check_copy as check_copy
from jaxzero.interop._load import load_adam as load_adam
from jaxzero.interop._load import load_into as load_into
from jaxzero.interop._load import open_checkpoint as open_checkpoint
from jaxzero.interop._load import register_checkpoint_form as register_checkpoint_form
from jaxzero.interop._load import tensors_from as tensors_from
from jaxzero.interop._load import torch_state_dict as torch_state_dict
from jaxzero.interop._load import write_checkpoint as write_checkpoint
from jaxzero.interop._match import Proposal as Proposal
from jaxzero.interop._match import match as match
from jaxzero.interop._rules import AddBiases as AddBiases
from jaxzero.interop._rules import Flatten as Flatten
from jaxzero.interop._rules import Merge as Merge
from jaxzero.interop._rules import MergeHeads as MergeHeads
from jaxzero.interop._rules import RotaryPairs as RotaryPairs
from jaxzero.interop._rules import Rule as Rule
from jaxzero.interop._rules import Split as Split
from jaxzero.interop._rules import SplitHeads as SplitHeads
from jaxzero.interop._rules import Transpose as Transpose
from jaxzero.interop._rules import Unflatten as Unflatten
from jaxzero.interop._rules import WeightNorm as WeightNorm
from jaxzero.interop._safetensors import save_tensors as save_tensors
from jaxzero.interop._safetensors import tensors_in as tensors_in
from jaxzero.interop._tensors import AdamMoments as AdamMoments
from jaxzero.interop._tensors import ArrayTensor as ArrayTensor
from jaxzero.interop._tensors import Checkpoint as Checkpoint
from jaxzero.interop._tensors import FileTensor as FileTensor
from jaxzero.interop._tensors import LazyTensor as LazyTensor
