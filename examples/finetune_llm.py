"""Fine-tune a decoder in a Hugging Face directory, whole or by LoRA, under ZeRO++.

    python examples/finetune_llm.py --model path/to/llama --lora-rank 8 --out finetuned
    python examples/finetune_llm.py --model path/to/llama --out finetuned --offload optimizer
    python examples/finetune_llm.py --model path/to/llama --out finetuned --sample "def main("

Weights are read straight into shards, and `transformers.AutoModelForCausalLM` loads what comes out.
"""

import contextlib
import dataclasses
import functools
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import PartitionSpec
from tokenizers import Tokenizer

import jaxzero as jz
from jaxzero import interop, models

ADAPTED = "query|key|value|output|gate|up|down"  # linear layers, for LoRA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Fine-tune a decoder."""

    model: Path  # a directory with `config.json` and safetensors
    out: Path  # where the result is written
    text: Path = Path(sysconfig.get_paths()["stdlib"])  # a file, or a directory of them
    lora_rank: int = 0  # 0: train all parameters
    frozen: Literal["file", "int8"] = "file"  # with LoRA: how the frozen weights are stored
    steps: int = 100
    batch: int = 8  # rows of a step, on all devices together
    length: int = 256  # tokens of a row
    learning_rate: float = 1e-4
    adaptive_batch: float | None = None  # SimiGrad, to this similarity; steps are micro-batches
    offload: tuple[Literal["weights", "gradients", "optimizer"], ...] = ()  # to host memory
    offload_min_size: int = 2**20  # arrays with fewer elements stay on the device
    nodes: int | None = None  # of the mesh; None: as the devices say
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    scan_layers: bool = True  # off for models whose layers differ
    sample: str | None = None  # a prompt that is continued before training and after it
    sample_tokens: int = 64  # new tokens of it


def config_of(settings: Settings) -> jz.ZeroConfig:
    """ZeRO++, with the chosen arrays in host memory, frozen weights included."""
    if not settings.offload:
        return jz.zeropp()
    if settings.adaptive_batch is not None:
        raise ValueError("`offload` does not go with `adaptive_batch`. Leave out one of the two.")
    if settings.sample is not None:
        raise ValueError("`offload` does not go with `sample`. Leave out one of the two.")
    chosen = dict.fromkeys(settings.offload, True)
    offload = jz.Offload(**chosen, min_size=settings.offload_min_size)
    return dataclasses.replace(jz.zeropp(), offload=offload)


class Adapted(nnx.Module):
    """A linear layer with an adapter: x W + x A B."""

    def __init__(self, linear: nnx.Linear, adapter: dict[str, Any]):
        self.linear = linear
        self.a, self.b = nnx.Param(adapter["a"]), nnx.Param(adapter["b"])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + x @ self.a.astype(x.dtype) @ self.b.astype(x.dtype)


def layer_of(path: Any) -> str | None:
    """Which layer that gets an adapter a parameter is the kernel of, if it is."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    found = re.fullmatch(rf"(layers\..*\.({ADAPTED}))\.kernel\.value", name)
    return found and found[1]


def make_adapters(key: jax.Array, shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, Any]:
    """A is random and B is zero, so that training starts at the model itself."""
    keys = jax.random.split(key, len(shapes))
    return {
        path: {
            "a": jax.random.normal(k, (*rest, num_in, rank)) / num_in**0.5,
            "b": jnp.zeros((*rest, rank, num_out)),
        }
        for k, (path, (*rest, num_in, num_out)) in zip(keys, shapes.items(), strict=True)
    }


def add_adapters(model: Any, adapters: dict[str, Any]) -> None:
    """Put an `Adapted` in the place of each linear layer that has an adapter."""
    for path, adapter in adapters.items():
        *owners, name = path.split(".")
        owner = functools.reduce(
            lambda x, key: x[int(key)] if key.isdigit() else getattr(x, key), owners, model
        )
        setattr(owner, name, Adapted(getattr(owner, name), adapter))


@dataclasses.dataclass(frozen=True)
class Merged(interop.LazyTensor):
    """W + A B, computed when it is written: one tensor at a time, W from the file it was in."""

    shape: tuple[int, ...]
    dtype: np.dtype
    label: str
    base: interop.LazyTensor
    a: np.ndarray
    b: np.ndarray

    def _read_box(self, box):
        *rest, rows, columns = (slice(start, stop) for start, stop in box)
        added = self.a[(*rest, rows)] @ self.b[(*rest, slice(None), columns)]
        base = self.base[(*rest, rows, columns)]
        return (base.astype(np.float32) + added).astype(self.dtype)


def merge(loaded: Any, adapters: dict[str, Any]) -> Any:
    """The tree of the model, of tensors in files and whole adapters."""

    def merged(path, tensor):
        if (layer := layer_of(path)) is None:
            return tensor
        a, b = (np.asarray(adapters[layer][key]) for key in "ab")
        return Merged(tensor.shape, tensor.dtype, tensor.label, tensor, a, b)

    return jax.tree_util.tree_map_with_path(merged, loaded)


def open_tokenizer(settings: Settings, vocabulary_size: int) -> Tokenizer | None:
    """The tokenizer of the model; None if there is none, for bytes."""
    path = settings.model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
    if tokenizer is not None:
        tokenizer.no_truncation()
    elif vocabulary_size < 256:  # not even bytes
        raise ValueError(f"`model` must have a tokenizer; there is no {str(path)!r}.")
    return tokenizer


def make_writer(
    zero: jz.Zero, config: models.DecoderConfig, model_of: Callable[..., Any], settings: Settings
) -> Callable[[Any, Any], str]:
    """A function of trained and frozen parameters that continues `settings.sample`.

    Parameters stay sharded: each layer is gathered at every token, as in training.
    """
    tokenizer = open_tokenizer(settings, config.vocabulary_size)
    prompt = settings.sample or ""
    ids = tokenizer.encode(prompt).ids if tokenizer else list(prompt.encode())
    sampling = models.Sampling.from_json(settings.model, temperature=0.0)
    whole = PartitionSpec()  # every device computes the one text
    decode = zero.apply(
        lambda trained, cache, ids, mask, frozen: model_of(trained, frozen).decode(
            cache, ids, mask
        ),
        in_specs=(None, whole, whole, whole, None),
        out_reduce="first",
    )

    @jax.jit
    def generate(trained, frozen):
        return models.generate(
            lambda cache, ids, mask: decode(trained, cache, ids, mask, frozen),
            models.make_cache(config, 1, len(ids) + settings.sample_tokens - 1),
            jnp.array([ids], jnp.int32),
            max_new_tokens=settings.sample_tokens,
            sampling=sampling,
        )

    def write(trained, frozen):
        tokens, lengths = jax.device_get(generate(trained, frozen))
        text = [*ids, *tokens[0, : lengths[0]].tolist()]
        return tokenizer.decode(text) if tokenizer else bytes(text).decode(errors="replace")

    return write


def read_batches(settings: Settings, vocabulary_size: int) -> np.ndarray:
    """The tokens of each step, in random order: int32 `[steps, batch, length]`."""
    tokenizer = open_tokenizer(settings, vocabulary_size)
    files = [settings.text] if settings.text.is_file() else sorted(settings.text.rglob("*"))
    num_wanted, ids = settings.steps * settings.batch, []
    for file in filter(Path.is_file, files):
        with contextlib.suppress(UnicodeDecodeError):  # not a text
            text = file.read_text("utf-8")
            ids += tokenizer.encode(text).ids if tokenizer else text.encode()
        if len(ids) >= num_wanted * settings.length:
            break
    num_rows = len(ids) // settings.length
    if num_rows < settings.batch:
        raise ValueError(f"`text` gives {num_rows} rows, fewer than `batch`. Point it to more.")
    rows = np.array(ids[: num_rows * settings.length], np.int32).reshape(num_rows, -1)
    random, num_epochs = np.random.default_rng(0), -(-num_wanted // num_rows)
    order = np.concatenate([random.permutation(num_rows) for _ in range(num_epochs)])
    return rows[order[:num_wanted]].reshape(settings.steps, settings.batch, settings.length)


def init_params(zero: jz.Zero, loaded: Any, settings: Settings) -> tuple[Any, Any]:
    """What is trained, and the frozen weights of LoRA or None; sharded."""
    if not settings.lora_rank:
        return zero.shard(loaded.params), None
    leaves = jax.tree_util.tree_leaves_with_path(loaded.params)
    shapes = {layer: x.shape for path, x in leaves if (layer := layer_of(path))}
    make = functools.partial(make_adapters, shapes=shapes, rank=settings.lora_rank)
    trained = zero.init(make, jax.random.key(0))
    codec = jz.Int8() if settings.frozen == "int8" else None
    return trained, zero.shard(loaded.params, codec=codec)


def finetune(settings: Settings) -> tuple[list[float], Any]:
    """Train and export: the losses, and what was trained (sharded parameters, or adapters)."""
    zero = jz.Zero(jz.make_mesh(settings.nodes), config_of(settings))
    loaded = interop.load_decoder(
        settings.model,
        dtype=None if settings.lora_rank else "float32",  # what is trained is float32
        compute_dtype=settings.compute_dtype,
        scan_layers=settings.scan_layers,
        remat="full",
    )
    batches = read_batches(settings, loaded.config.vocabulary_size)
    trained, frozen = init_params(zero, loaded, settings)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(settings.learning_rate))
    if settings.adaptive_batch is not None:
        tx = jz.simigrad(tx, target_similarity=settings.adaptive_batch, initial=2, max_steps=256)
    tx = optax.with_extra_args_support(tx)
    opt_state = zero.init_optimizer(tx, trained)

    def model_of(trained, frozen):
        model = nnx.merge(loaded.graph, trained if frozen is None else frozen)
        if frozen is not None:
            add_adapters(model, trained)
        return model

    def loss_fn(trained, ids, frozen):
        model, labels = model_of(trained, frozen), ids[:, 1:]
        hidden = model.hidden(ids)[:, :-1]
        return model.cross_entropy(hidden, labels, jnp.ones(labels.shape))[0] / labels.size

    platform = jax.devices()[0].platform
    options = jz.compiler_options(platform, offload=bool(settings.offload))

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=options)
    def step(trained, opt_state, ids, frozen):
        loss, grads = zero.value_and_grad(loss_fn)(trained, ids, frozen)
        extra = {}
        if settings.adaptive_batch is not None:
            extra["codec_noise"] = zero.codec_noise(grads)
        trained, opt_state = zero.apply_gradients(tx, grads, opt_state, trained, **extra)
        return trained, opt_state, loss

    write = None
    if settings.sample is not None:
        write = make_writer(zero, loaded.config, model_of, settings)
        print(f"Before training: {write(trained, frozen)}")
    losses = []
    for i, ids in enumerate(batches):
        trained, opt_state, loss = step(trained, opt_state, ids, frozen)
        losses.append(float(loss))
        print(f"step {i}: loss {losses[-1]:.4f}")
        if settings.adaptive_batch is not None:
            stats = jz.simigrad_stats(opt_state)
            print(f"  {stats['steps']} micro-batches, similarity {stats['similarity']:.3f}")

    if write is not None:
        print(f"After training: {write(trained, frozen)}")
    whole = merge(loaded.params, zero.unshard(trained)) if settings.lora_rank else trained
    interop.export_decoder(whole, settings.out, source=settings.model, dtype="source")
    print(f"Written to {settings.out}, in the dtype of {settings.model}.")
    return losses, trained


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    finetune(tyro.cli(Settings))
