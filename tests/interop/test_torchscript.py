"""Programs of TorchScript: the state dict that PyTorch reads of them, or an error."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest

from jaxzero import interop

from .fuzzing import damaged, equal, fuzz

torch = pytest.importorskip("torch", reason="needs torch: it writes the files")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.arange(3.0))
        self.register_buffer("absent", None)

    def forward(self, x):
        return x * self.scale


class Net(torch.nn.Module):
    """With tensors that are neither parameters nor buffers, and a module at two places."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, bias=False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.named = torch.nn.ModuleDict({"a-b": Inner(), "c": Inner()})
        self.row = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(2)))
        self.again = self.linear
        self.several = torch.nn.ParameterList([torch.ones(2), torch.zeros(3)])
        self.register_buffer("table", torch.arange(3.0))
        self.attribute = torch.ones(3)
        self.settings = {"a": torch.ones(1)}
        self.numbers = [1, 2]

    def forward(self, x):
        y = self.row(self.norm(self.again(self.linear(x)))) + self.table + self.attribute
        y = self.named["a-b"](y) + self.named["c"](y) + self.numbers[0]
        return y + torch.tensor([1.0, 2.0, 3.0]) + self.settings["a"]


@pytest.fixture(scope="module")
def scripted():
    return torch.jit.script(Net().eval())


def saved(path: Path, program) -> Path:
    torch.jit.save(program, path, _extra_files={"notes.txt": b"x" * 500})
    return path


def test_the_names_and_values_are_those_of_torch(tmp_path: Path, scripted):
    net = Net().eval()
    traced = torch.jit.trace(net, torch.ones(4, 3))
    for program in (scripted, traced):
        path = saved(tmp_path / "p.pt", program)
        checkpoint, theirs = interop.open_checkpoint(path), torch.jit.load(path).state_dict()
        assert list(checkpoint) == list(theirs) and "again.weight" in theirs
        assert not {"attribute", "settings"} & theirs.keys()
        assert all(equal(checkpoint[name].read(), theirs[name]) for name in theirs)


def test_constants_are_no_weights(tmp_path: Path, scripted):
    path = saved(tmp_path / "frozen.pt", torch.jit.freeze(scripted))
    with pytest.raises(ValueError, match=r"frozen\.pt' is a program .* give the program that was"):
        interop.open_checkpoint(path)


def entries_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(path: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("entry", "old", "new", "message"),
    [
        (
            "test_torchscript.py",
            b"class Net(Module)",
            b"class Not(Module)",
            "declare the class '__torch_",
        ),
        (
            "test_torchscript.py",
            b"(Module):",
            b"(Thing):",
            r"'Net\(Thing\)' in a form that is not known",
        ),
        ("test_torchscript.py", b'["table", ]', b'["t\\x61ble", ]', "in a form that is not known"),
        ("test_torchscript.py", b'["table", ]', b'["numbers", ]', "declares 'numbers' as a tensor"),
        ("test_torchscript.py", b'["table", ]', b'["missing", ]', "declares 'missing' as a tensor"),
        ("linear.py", b"__parameters__", b"__params__", "not declare the parameters of 'linear.'"),
        (
            "data.pkl",
            b"torchscript\nNet\n",
            b"torchscript\nInner\n",
            "declares 'scale' as a tensor",
        ),
        (
            "data.pkl",
            b"__torch__.tests.interop.test_torchscript\nNet\n",
            b"os\nsystem\n",
            "names `os.system`",
        ),
    ],
)
def test_programs_that_lie(entry: str, old: bytes, new: bytes, message: str, tmp_path, scripted):
    entries = entries_of(saved(tmp_path / "p.pt", scripted))
    name = next(each for each in entries if each.endswith(entry))
    assert old in entries[name]
    entries[name] = entries[name].replace(old, new, 1)
    pack(tmp_path / "p.pt", entries)
    with pytest.raises(ValueError, match=rf"p\.pt' .*{message}"):
        interop.open_checkpoint(tmp_path / "p.pt")


def test_code_of_gigabytes_is_not_unpacked(tmp_path: Path, scripted):
    path = saved(tmp_path / "p.pt", scripted)
    entries = entries_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            if name.endswith("test_torchscript.py"):
                archive.writestr(name, bytes(2**26 + 1), zipfile.ZIP_DEFLATED)
            else:
                archive.writestr(name, content)
    with pytest.raises(ValueError, match="declares its classes in more than"):
        interop.open_checkpoint(path)


def test_damaged_programs(tmp_path: Path, scripted):
    whole = saved(tmp_path / "p.pt", scripted).read_bytes()
    theirs = scripted.state_dict()

    def damage(rng: random.Random) -> None:
        (tmp_path / "p.pt").write_bytes(damaged(whole, rng, range(len(whole))))

    def check(ours) -> None:  # checksums protect all but what is not read
        assert list(ours) == list(theirs)
        assert sum(not equal(ours[name], theirs[name]) for name in theirs) <= 3  # no checksum

    fuzz(tmp_path / "p.pt", 60, 0, damage=damage, read=interop.open_checkpoint, check=check)
