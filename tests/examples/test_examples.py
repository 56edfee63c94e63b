"""The examples and the README's first program run as they stand, and learn."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = ROOT / "tests" / "fixtures" / "deepspeed"
TEXT = "A row of these words is easily learned.\n" * 20


def _run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here():
    """Those in `examples/porting/` are run by the tests of their pages."""
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {"finetune_llm", "from_deepspeed", "grpo_digits", "several_hosts"}


@pytest.mark.ci
def test_the_example_for_several_hosts_runs_alone_and_goes_on(tmp_path: Path):
    program = str(ROOT / "examples" / "several_hosts.py")
    for steps in (2, 4):
        lines = _run(program, str(tmp_path), "--steps", str(steps), "--save-every", "2")
    assert "resumed after 2\nstep 3 loss" in lines and "step 4 loss" in lines


@pytest.mark.ci
def test_reinforcement_learning_samples_moves_weights_and_trains():
    program = str(ROOT / "examples" / "grpo_digits.py")
    sizes = ["--steps", "3", "--warmup", "3", "--prompts", "4", "--group", "4", "--hidden", "16"]
    lines = _run(program, *sizes).splitlines()
    rewards = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)
    parts = [line.split()[0] for line in lines[lines.index("part      median ms of a step") :]]
    assert parts == ["part", "reshard", "sample", "train", "reward"]


@pytest.mark.slow
def test_readme():
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert float(_run("-c", program, JAX_NUM_CPU_DEVICES="8").split()[-1]) < 0.5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of bytes, in the files of transformers, and a text."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "dtype": "float32",
    }
    shapes = {"model.embed_tokens": (256, 32), "lm_head": (256, 32), "model.norm": (32,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (32, 32) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (16, 32) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (48, 32) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (32, 48)}
        shapes |= {f"{layer}.{name}_layernorm": (32,) for name in ("input", "post_attention")}
    random = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": (len(shape) == 1) + 0.1 * random.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
    folder = tmp_path_factory.mktemp("llama")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "text").write_text(TEXT)
    return folder


def _finetune(llama: Path, out: Path, **settings: Any) -> tuple[list[float], Any]:
    example = _module("finetune_llm")
    return example.finetune(
        example.Settings(
            model=llama,
            out=out,
            text=llama / "text",
            length=16,
            learning_rate=1e-2,
            nodes=2,
            compute_dtype="float32",
            **settings,
        )
    )


def _loss_in_transformers(directory: Path) -> float | None:
    """Over the text; None where there is no torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    size = len(TEXT) // 16 * 16
    ids = torch.tensor(list(TEXT.encode()[:size])).reshape(-1, 16)
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.standard_promotion  # optax
def test_finetuning_a_whole_decoder(llama, tmp_path):
    losses, params = _finetune(llama, tmp_path / "out", steps=8)
    assert losses[-1] < 0.8 * losses[0]
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == load_file(llama / "model.safetensors").keys()
    queries = np.asarray(params["layers"]["attention"]["query"]["kernel"].get_value())
    for i in range(2):
        name = f"model.layers.{i}.self_attn.q_proj.weight"
        np.testing.assert_array_equal(exported[name], queries[i].T)
    loss = _loss_in_transformers(tmp_path / "out")
    assert loss is None or loss < 0.8 * losses[0]


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_finetuning_shows_what_the_model_writes(llama, tmp_path, capsys):
    """It has learned what follows within the length of its rows."""
    _finetune(llama, tmp_path / "out", steps=40, sample="A row of", sample_tokens=8)
    before, after = re.findall(r"(?:Before|After) training: (.*)", capsys.readouterr().out)
    assert before.startswith("A row of") and before != after == "A row of these w"
    with pytest.raises(ValueError, match="`offload` does not go with `sample`"):
        _finetune(llama, tmp_path / "out", steps=1, sample="A", offload=("optimizer",))


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.ci
def test_finetuning_with_offload(llama, tmp_path):
    """The norm of the gradients, by which they are clipped, is summed up in another order."""
    everything = {"offload": ("weights", "gradients", "optimizer"), "offload_min_size": 64}
    runs = [
        _finetune(llama, tmp_path / str(i), steps=3, **settings)
        for i, settings in enumerate([everything, {}])
    ]
    (losses, params), (expected, _) = runs
    assert {x.sharding.memory_kind for x in jax.tree.leaves(params) if x.size >= 64} == {
        "pinned_host"
    }
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.standard_promotion
def test_finetuning_adapters(llama, tmp_path):
    """Over weights stored in 8 bits, with a batch that adapts; merged into those of the file."""
    rank = 4
    losses, adapters = _finetune(
        llama, tmp_path / "out", steps=12, lora_rank=rank, frozen="int8", adaptive_batch=0.5
    )
    assert losses[-1] < 0.9 * losses[0]
    before = load_file(llama / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    theirs = {
        "layers.attention.query": "self_attn.q_proj",
        "layers.attention.key": "self_attn.k_proj",
        "layers.attention.value": "self_attn.v_proj",
        "layers.attention.output": "self_attn.o_proj",
        "layers.mlp.gate": "mlp.gate_proj",
        "layers.mlp.up": "mlp.up_proj",
        "layers.mlp.down": "mlp.down_proj",
    }
    assert adapters.keys() == theirs.keys()
    for layer, adapter in adapters.items():
        a, b = (np.asarray(adapter[key], np.float64) for key in "ab")
        for i in range(2):
            name = f"model.layers.{i}.{theirs[layer]}.weight"
            base = before.pop(name).T
            assert np.abs(a[i] @ b[i]).max() > 1e-3, name
            # A product of `rank` terms and one addition, each rounded to float32.
            size = np.abs(base) + np.abs(a[i]) @ np.abs(b[i])
            error = np.abs(after.pop(name).T - (base + a[i] @ b[i]))
            assert (error <= (rank + 1) * 2.0**-24 * size).all(), name
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    loss = _loss_in_transformers(tmp_path / "out")
    assert loss is None or loss < 0.9 * losses[0]


@pytest.mark.slow
def test_going_on_from_deepspeed():
    """The next 5 steps are those that DeepSpeed made, and then it learns something else."""
    example = _module("from_deepspeed")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        with pytest.warns(
            UserWarning, match="no effect here: .*offload_optimizer.*steps_per_print"
        ):
            run = example.set_up()
        step, state = example.make_step(run), example.resume(run, DEEPSPEED / "zero3")
        with np.load(DEEPSPEED / "zero3" / "expected.npz") as expected:
            losses = example.train(step, state, expected["batches"].astype(np.int32))
            # As in `test_torch_checkpoints.py`.
            np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-5)
        learned = example.train(step, example.start(run), example.batches(41, run.batch_size))
    assert learned[-1] < 0.1 * learned[0]
