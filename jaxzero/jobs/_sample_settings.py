"""Settings of `jaxzero sample`. Field docstrings are the help texts of the command line."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Continue texts with a decoder, and print them as they are written.

    How tokens are chosen and where a text ends follows from `generation_config.json`; options
    replace what the file says.
    """

    directory: Annotated[Positional[Path], arg(metavar="DIR")]
    """Folder with a decoder and `tokenizer.json`, as `save_pretrained` writes them."""

    prompt: UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; repeat the option for several, which are computed as one batch."""

    max_new_tokens: int = 128
    """Tokens after which a text ends if no stop token came before."""

    temperature: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Divides the logits; 0 takes the most probable token each time."""

    top_k: Annotated[int | None, arg(metavar="INT")] = None
    """Choose among this many of the most probable tokens."""

    top_p: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Choose among the most probable tokens whose probabilities sum to this."""

    seed: int = 0
    """Of the random choices."""

    chat: bool = False
    """Each prompt is what a user says, put into the checkpoint's chat template; the model answers.
    Left out, it continues the prompt as it is."""

    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """Instructions that come before what the user says; implies `chat`."""

    devices: Annotated[int | None, arg(metavar="INT")] = None
    """Split the weights over this many accelerators, or fake devices if there is only a CPU (tensor
    parallelism). Left out, one holds all of them."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, arg(metavar="DTYPE")] = None
    """float32, bfloat16 or float16, of weights and computation. Left out, as in the checkpoint."""

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("`prompt` must be given: the text to continue.")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"`devices` must be at least 1; got {self.devices}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1; got {self.max_new_tokens}.")
