"""The workload: a stack of decoder layers of Llama-8B shape, acquired Linear by Linear."""

from __future__ import annotations

from checkpoint import Tensor

HIDDEN = 4096
INTERMEDIATE = 14336
HEADS = 32
KEY_HEADS = 8
LAYERS = 32
# in the order in which a decoder layer uses them: rows, columns
LINEARS = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (KEY_HEADS * HIDDEN // HEADS, HIDDEN),
    "v_proj": (KEY_HEADS * HIDDEN // HEADS, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
TYPES = {"U8": "|u1", "BF16": "<i2", "F32": "<f4", "I64": "<i8"}


def linears(layers: int = LAYERS) -> list[Tensor]:
    """The weights of all Linears, in the order of a pass; 13.96 GB for 32 layers."""
    return [
        Tensor(f"layers.{layer}.{name}.weight", "BF16", shape)
        for layer in range(layers)
        for name, shape in LINEARS.items()
    ]


def norms(layers: int = LAYERS) -> list[Tensor]:
    """The weights of all norms."""
    names = [f"layers.{layer}.{name}.weight" for layer in range(layers) for name in ("ln1", "ln2")]
    return [Tensor(name, "BF16", (HIDDEN,)) for name in [*names, "norm.weight"]]


def layers_of(tensors: list[Tensor]) -> list[tuple[str, list[str]]]:
    """Each tensor a layer of its own, named as its module is."""
    return [(tensor.name.removesuffix(".weight"), [tensor.name]) for tensor in tensors]


class _Address:
    """Device memory that somebody else owns, as torch takes it."""

    def __init__(self, address: int, count: int, typestr: str) -> None:
        # torch takes only what says that it may be written; the mapping says otherwise
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def view(address: int, dtype: str, shape: tuple[int, ...]):
    """A torch tensor over memory at a device address."""
    import torch

    count = 1
    for dimension in shape:
        count *= dimension
    tensor = torch.as_tensor(_Address(address, count, TYPES[dtype]), device="cuda")
    if dtype == "BF16":
        tensor = tensor.view(torch.bfloat16)
    return tensor.view(shape)


def stack(layers: int):
    """The model, its parameters without memory; set them by name with `set_parameter`."""
    import torch
    from torch import nn
    from torch.nn import functional

    class DecoderLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, (rows, columns) in LINEARS.items():
                setattr(self, name, nn.Linear(columns, rows, bias=False))
            self.ln1 = nn.RMSNorm(HIDDEN)
            self.ln2 = nn.RMSNorm(HIDDEN)

        def forward(self, hidden):
            batch, tokens, _ = hidden.shape

            def heads(projected, count):
                return projected.view(batch, tokens, count, HIDDEN // HEADS).transpose(1, 2)

            normed = self.ln1(hidden)
            query = heads(self.q_proj(normed), HEADS)
            key = heads(self.k_proj(normed), KEY_HEADS)
            value = heads(self.v_proj(normed), KEY_HEADS)
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            hidden = hidden + self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN))
            normed = self.ln2(hidden)
            gated = functional.silu(self.gate_proj(normed)) * self.up_proj(normed)
            return hidden + self.down_proj(gated)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(DecoderLayer() for _ in range(layers))
            self.norm = nn.RMSNorm(HIDDEN)

        def forward(self, hidden):
            for layer in self.layers:
                hidden = layer(hidden)
            return self.norm(hidden)

    with torch.device("meta"):
        model = Stack().to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def set_parameter(model, name: str, tensor) -> None:
    """Puts a tensor in the place of the parameter of that name."""
    from torch import nn

    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, nn.Parameter(tensor, requires_grad=False))


def hook(model, manager, layers: dict[str, int]) -> None:
    """Acquires each module named in `layers` before it runs, and releases it behind."""
    import torch

    def stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    for name, index in layers.items():
        module = model.get_submodule(name)
        module.register_forward_pre_hook(
            lambda _module, _args, index=index: manager.acquire(index, stream())
        )
        module.register_forward_hook(
            lambda _module, _args, _out, index=index: manager.release(index, stream())
        )
