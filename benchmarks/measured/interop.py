"""Time and peak memory of loading and saving a decoder of 2 GB, against transformers and torch.

    python -m benchmarks.measured.interop compare

Needs torch and transformers, and twice the size of the checkpoint on the disk of `--directory`.
Peers take turns, round by round, each time in a new process that has loaded and saved a small model
before. All files are in the page cache; loading ends when every page of every tensor has been
touched, since torch only maps files, and saving when every file is on the disk. "transformers, own
memory" also copies every parameter from the maps to memory, as `jaxzero` does: then an optimizer
can update them, and a file that changes later does not change the weights. `peak_bytes` is how
far resident memory (VmHWM) rose above where it was before: pages of mapped files count in it, those
of the page cache do not.

Before it loads, each process has a quarter more memory than the checkpoint takes backed by the host
(`_backed_memory.py`): times then are those of a machine that has its memory. Linux only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.shared._backed_memory import back_memory

SMALL = {"hidden": 256, "layers": 1, "vocabulary": 64}
PEERS = (
    "jaxzero",
    "transformers",
    "transformers, own memory",
    "safetensors.torch",
    "jaxzero, each of 2 processes",
)
_LARGEST_FILE = 5 * 10**8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama."""

    hidden: int = 2048
    layers: int = 20
    vocabulary: int = 32000
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def config(self) -> dict[str, Any]:
        """For `transformers.LlamaConfig`."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 11 * self.hidden // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.hidden // 256,
        }


def write_checkpoint(directory: Path, size: Size) -> None:
    """What `save_pretrained` would have written, file by file."""
    directory.mkdir()
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(**size.config(), dtype=size.dtype)
    dtype = getattr(torch, size.dtype)
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    parts: list[dict[str, Any]] = [{}]
    filled = 0
    for name, tensor in shapes.items():
        num_bytes = dtype.itemsize * tensor.numel()
        if parts[-1] and filled + num_bytes > _LARGEST_FILE:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor.shape
        filled += num_bytes
    weight_map = {}
    values = (0.02 * torch.randn(2**20)).to(dtype)
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        weight_map |= dict.fromkeys(part, file)
        tensors = {
            name: values.repeat(-(-shape.numel() // len(values)))[: shape.numel()].reshape(shape)
            for name, shape in part.items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


# What follows runs in a process of its own for each peer and round.


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)  # in kB
    return int(sizes[key].split()[0]) * 1024


def _measure(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, start = _memory("VmRSS"), time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": _memory("VmHWM") - before}, result


def _prepare(source: Path, share: float) -> float:
    """Read a checkpoint, and have memory for a share of it backed by the host.

    Returns:
        Seconds that writing as much memory took in the end.
    """
    files = list(source.glob("*.safetensors"))
    for file in files:
        with open(file, "rb") as opened:
            while opened.read(2**20):
                pass
    return back_memory(int(1.25 * share * sum(file.stat().st_size for file in files)) + 2**20)


def _flush(directory: Path) -> None:
    """What `export_decoder` does of itself."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _start_jax(process: int, address: str) -> None:
    import jax

    num_processes = 2 if address else 1
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // num_processes)
    if address:
        jax.distributed.initialize(address, num_processes, process)


def _run_jaxzero(source: Path, out: Path, saves: bool) -> dict[str, Any]:
    import jax

    import jaxzero as jz
    from jaxzero import interop

    zero = jz.Zero(jz.make_mesh(nodes=2))

    def load() -> Any:
        return jax.block_until_ready(zero.shard(interop.load_decoder(source).params))

    loaded, params = _measure(load)
    found: dict[str, Any] = {"load": loaded}
    if saves:
        found["save"], _ = _measure(lambda: interop.export_decoder(params, out, source=source))
    leaves = jax.tree.leaves(params)
    own = [sum(shard.data.nbytes for shard in x.addressable_shards) for x in leaves]
    sizes = {"own_bytes": sum(own), "largest_tensor_bytes": max(x.nbytes for x in leaves)}
    return found | sizes


def _run_torch(source: Path, out: Path, saves: bool, peer: str) -> dict[str, Any]:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.logging.disable_progress_bar()
    out.mkdir()

    def load() -> tuple[Any, dict[str, Any]]:
        model = None
        if peer.startswith("transformers"):
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
            if peer == "transformers, own memory":
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            tensors = model.state_dict()
        else:
            files = sorted(source.glob("*.safetensors"))
            tensors = {k: x for file in files for k, x in load_file(file).items()}
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8)[::4096].sum()
        return model, tensors

    loaded, (model, tensors) = _measure(load)

    def save() -> None:
        if model is not None:
            model.save_pretrained(out, max_shard_size=_LARGEST_FILE)
        else:
            save_file(tensors, out / "model.safetensors")
        _flush(out)

    found = {"load": loaded} | ({"save": _measure(save)[0]} if saves else {})
    own = sum(x.nbytes for x in tensors.values())
    largest = max(x.nbytes for x in tensors.values())
    return found | {"own_bytes": own, "largest_tensor_bytes": largest}


def work(peer: str, folder: Path, process: int = 0, address: str = "", saves: bool = True) -> None:
    """Load and save the small model, then the large one, and print what that took."""
    found = {}
    if peer.startswith("jaxzero"):
        _start_jax(process, address)
    for name in ("small", "large"):
        source, out = folder / name, folder / f"{name}-out"
        is_ours = peer.startswith("jaxzero")
        run = _run_jaxzero if is_ours else functools.partial(_run_torch, peer=peer)
        backed = _prepare(source, 0.5 if address else 1.0)
        found = run(source, out, saves)
        found["load"]["seconds_to_write_as_much_memory"] = backed
    print(json.dumps(found))


# And this in the process that starts them.


def _start(*arguments: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.measured.interop", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"A process of {process.args} failed; its errors are above.")
    return json.loads(output.splitlines()[-1])


def _turn(peer: str, folder: Path, saves: bool) -> dict[str, Any]:
    given = ("work", "--peer", peer, "--folder", folder, "--saves" if saves else "--no-saves")
    if "2 processes" not in peer:
        return _finish(_start(*given))
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        address = f"localhost:{listener.getsockname()[1]}"
    running = [_start(*given, "--address", address, "--process", number) for number in range(2)]
    first, second = map(_finish, running)
    for action in first.keys() & {"load", "save"}:
        for key, value in second[action].items():
            first[action][key] = max(first[action][key], value)
    return first


def _summary(
    rounds: list[dict[str, Any]], others: list[dict[str, Any]], copied: list[dict[str, Any]]
) -> dict[str, Any]:
    summary = {key: rounds[0][key] for key in ("own_bytes", "largest_tensor_bytes")}
    for action in ("load", "save") if "save" in rounds[0] else ("load",):
        seconds = [each[action]["seconds"] for each in rounds]
        summary[f"{action}_seconds_median"] = round(statistics.median(seconds), 2)
        summary[f"{action}_seconds_range"] = [round(min(seconds), 2), round(max(seconds), 2)]
        for name, peers in (("transformers", others), ("transformers_own_memory", copied)):
            ratios = [
                each[action]["seconds"] / peer[action]["seconds"]
                for each, peer in zip(rounds, peers, strict=True)
            ]
            summary[f"{action}_time_over_{name}_median"] = round(statistics.median(ratios), 3)
        if action == "load":
            backed = [each["load"]["seconds_to_write_as_much_memory"] for each in rounds]
            summary["seconds_to_write_as_much_memory_max"] = round(max(backed), 2)
        summary[f"{action}_peak_bytes"] = max(each[action]["peak_bytes"] for each in rounds)
    peak = summary["load_peak_bytes"] - summary["largest_tensor_bytes"]
    summary["load_peak_less_one_tensor_over_own"] = round(peak / summary["own_bytes"], 3)
    return summary


def compare(
    size: Size = Size(),  # noqa: B008
    rounds: int = 3,
    directory: Path | None = None,
    saves: bool = True,
) -> None:
    """Measure all peers in turn, and append a row.

    Args:
        size: of the model.
        rounds: how often each peer loads and saves.
        saves: whether to measure saving too.
        directory: where the checkpoint and its copies are written, and removed.
    """
    from benchmarks.shared._rows import append_row

    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS}
    with tempfile.TemporaryDirectory(dir=directory) as name:
        folder = Path(name)
        write_checkpoint(folder / "small", dataclasses.replace(size, **SMALL))
        write_checkpoint(folder / "large", size)
        for i in range(rounds):
            for peer in PEERS if i % 2 else PEERS[::-1]:
                found[peer].append(_turn(peer, folder, saves))
                for out in folder.glob("*-out"):
                    shutil.rmtree(out)
    others = found["transformers"], found["transformers, own memory"]
    peers = {peer: _summary(measured, *others) for peer, measured in found.items()}
    append_row("interop", {"rounds": rounds, **vars(size), "peers": peers})


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"compare": compare, "work": work})
