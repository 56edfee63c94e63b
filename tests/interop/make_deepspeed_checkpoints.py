"""Make the checkpoints in `tests/fixtures/deepspeed` with a real DeepSpeed, on two CPU processes.

They are committed, so the tests need no DeepSpeed. To make them again, in an environment of its own
(its optimizers are those of torch, so nothing is compiled):

    python3.11 -m venv ENV
    ENV/bin/pip install torch setuptools wheel numpy
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 ENV/bin/pip install --no-build-isolation deepspeed==0.19.8
    ENV/bin/python -m tests.interop.make_deepspeed_checkpoints

Each case is trained for 3 steps and saved, and then for 5 more. `expected.npz` holds what DeepSpeed
itself says of its state when it saved (full parameters and moments), the batches and losses of the
5 steps, and the parameters after them. Two more files are read off DeepSpeed's own classes:
`schedules.json`, learning rates by step, and `loss_scale.json`, loss scales by overflows; and
`optimizers.json` holds what optimizers of PyTorch make of some gradients.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch

from tests.models import torch_model
from tests.models.torch_model import BEFORE, RANKS, ROWS

HERE = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
BASE = {
    "train_micro_batch_size_per_gpu": ROWS // RANKS,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": torch_model.CLIP,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": torch_model.ADAMW | {"torch_adam": True}},
}

CASES = {
    "zero1": BASE | {"zero_optimization": {"stage": 1, "parameter_alignment": True}},
    # Its state is that of `BF16_Optimizer`, which does not say its stage.
    "zero1_bf16": BASE
    | {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero1_elastic": BASE | {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    "zero2": BASE | {"zero_optimization": {"stage": 2}},
    "zero2_round_robin": BASE | {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "zero3": BASE
    | {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 60,  # several groups, so that parameters are found in each
        }
    },
}


def _trained(engine) -> list[tuple]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]


def whole(engine, prefix: str) -> dict[str, np.ndarray]:
    """Everything DeepSpeed knows of the trained parameters, by name."""
    if engine.zero_round_robin_gradients():  # it reports, and converts, those under wrong names
        return {f"{prefix}/fp32/{n}": p.detach().numpy().copy() for n, p in _trained(engine)}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links the moments of all groups after the first group has stepped, when those of
        # the second do not exist yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, p in _trained(engine):
        found[f"{prefix}/fp32/{name}"] = safe_get_full_fp32_param(p)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{prefix}/{key}/{name}"] = safe_get_full_optimizer_state(p, key)
    return {name: value.detach().float().numpy().copy() for name, value in found.items()}


def train(case: str) -> None:
    """One process of the two."""
    import deepspeed

    torch.manual_seed(0)
    model = torch_model.Model()
    frozen = model.frozen.weight.detach().numpy().copy()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=torch_model.groups(model), config=CASES[case]
    )
    rank = torch.distributed.get_rank()
    batches = torch_model.batches()

    def step(batch):
        loss = engine(batch.chunk(RANKS)[rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        return mean.item() / RANKS

    for batch in batches[:BEFORE]:
        step(batch)
    folder = HERE / case
    engine.save_checkpoint(str(folder), tag="step3")
    expected = whole(engine, "saved")
    losses = [step(batch) for batch in batches[BEFORE:]]
    expected |= whole(engine, "after")
    if rank == 0:
        expected |= {"batches": batches[BEFORE:].numpy(), "losses": np.array(losses)}
        np.savez_compressed(folder / "expected.npz", frozen=frozen, **expected)
    torch.distributed.barrier()


def schedules() -> dict[str, dict]:
    """Learning rates of the first 24 steps, from DeepSpeed's schedulers."""
    from deepspeed.runtime import lr_schedules

    asked = {
        "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 6},
        "WarmupLR linear": {"warmup_max_lr": 0.02, "warmup_num_steps": 6, "warmup_type": "linear"},
        "WarmupDecayLR": {"total_num_steps": 20, "warmup_max_lr": 0.02, "warmup_num_steps": 5},
        "WarmupCosineLR": {
            "total_num_steps": 20,
            "warmup_min_ratio": 0.1,
            "warmup_num_steps": 5,
            "cos_min_ratio": 0.05,
        },
        "OneCycle": {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.02,
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 4,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "cycle_momentum": False,
        },
        "LRRangeTest": {
            "lr_range_test_min_lr": 0.001,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
    }
    found = {}
    for name, params in asked.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
        scheduler = getattr(lr_schedules, name.split()[0])(optimizer, **params)
        rates = []
        for _ in range(24):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        found[name] = {"type": name.split()[0], "params": params, "rates": rates}
    return found


def loss_scales() -> list[dict]:
    """Scales that DeepSpeed's scaler takes when steps overflow or do not."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    found = []
    draw = random.Random(0)
    for window, hysteresis, consecutive in [(3, 2, False), (4, 1, False), (3, 3, True)]:
        overflows = [draw.random() < 0.25 for _ in range(60)]
        scaler = DynamicLossScaler(
            2.0**8, window, 1.0, hysteresis, consecutive, raise_error_at_min_scale=False
        )
        scales = []
        for overflow in overflows:
            scales.append(scaler.cur_scale)
            scaler.update_scale(overflow)
        found.append(
            {
                "fp16": {
                    "initial_scale_power": 8,
                    "loss_scale_window": window,
                    "hysteresis": hysteresis,
                    "consecutive_hysteresis": consecutive,
                    "min_loss_scale": 1.0,
                },
                "overflows": overflows,
                "scales": scales,
            }
        )
    return found


def optimizers() -> list[dict]:
    """What DeepSpeed builds for an entry "optimizer", and parameters after each of 5 updates."""
    adam = {"weight_decay": 0.1, "eps": 1e-6}
    adamw = {"lr": 0.1, "weight_decay": 0.1, "betas": [0.5, 0.7]}
    sgd = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    asked = [
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {}),
        ("Adam", adam | {"adam_w_mode": False, "torch_adam": True}, torch.optim.Adam, adam),
        ("Adam", adamw | {"torch_adam": True}, torch.optim.AdamW, adamw),
        ("SGD", sgd, torch.optim.SGD, sgd),
    ]
    gradients = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = []
    for kind, params, make, options in asked:
        x = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        optimizer, after = make([x], **options), []
        for gradient in gradients:
            x.grad = gradient.clone()
            optimizer.step()
            after.append(x.tolist())
        run = {"optimizer": {"type": kind, "params": params}}
        found.append(run | {"gradients": gradients.tolist(), "after": after})
    return found


def _age(directory: Path) -> None:
    """Take out of a checkpoint what DeepSpeed did not write before 0.7."""
    for file in directory.glob("*_optim_states.pt"):
        state = torch.load(file, weights_only=False)
        for key in ("param_slice_mappings", "param_alignment_paddings"):
            del state["optimizer_state_dict"][key]
        torch.save(state, file)


def _make_universal(case: str, name: str) -> None:
    universal = HERE / name / "step3"
    shutil.rmtree(universal.parent, ignore_errors=True)
    universal.parent.mkdir()
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        + ["--input_folder", str(HERE / case / "step3"), "--output_folder", str(universal)]
        + ["--num_extract_workers", "1", "--num_merge_workers", "1"],
        check=True,
    )


def main() -> None:
    """Run two processes for each case, then convert two to universal checkpoints."""
    for case in CASES:
        shutil.rmtree(HERE / case, ignore_errors=True)
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.interop.make_deepspeed_checkpoints", case],
                env=environment
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            )
            for rank in range(RANKS)
        ]
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"DeepSpeed failed in case {case!r}.")
        for script in (HERE / case).glob("*.py"):  # copies of DeepSpeed's own
            script.unlink()
    _age(HERE / "zero1_elastic" / "step3")
    _make_universal("zero2", "universal")
    _make_universal("zero3", "universal_zero3")
    (HERE / "schedules.json").write_text(json.dumps(schedules(), indent=1) + "\n")
    (HERE / "optimizers.json").write_text(json.dumps(optimizers()) + "\n")
    import deepspeed

    rendezvous = {"init_method": "tcp://127.0.0.1:29534", "rank": 0, "world_size": 1}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, **rendezvous)
    (HERE / "loss_scale.json").write_text(json.dumps(loss_scales()) + "\n")


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
