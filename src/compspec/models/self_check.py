"""Proves at load that the attention which runs is ours, and records what each layer asks of it.

The model runs once on two short sequences packed together, over a small paged cache, through a recording
attention function; then on each alone with transformers' own eager attention. Both must agree, so a
family that ignores our function, drops its arguments, mixes sequences or needs more than the function
implements cannot pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compspec.errors import CompspecError, ModelError, UnsupportedError
from compspec.models.adapter import AttentionLayer, run_module, slices_logits, text_config
from compspec.models.linears import same_inputs
from compspec.models.probe import PROBE_NAME, Probe
from compspec.models.quiet import one_line, quiet_transformers

_BLOCK_SIZE = 8
_LENGTHS = (11, 14)
# Relative error of a row of logits. Kernels round differently at different shapes; a model that runs
# other attention is wrong by its own size. A few rows may differ more: in a mixture of experts one
# rounding can change which expert a token gets.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-2, torch.bfloat16: 0.15}
_ROWS_THAT_MUST_AGREE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the check learned.

    Attributes:
        layers: in the order in which they ran.
        vocab_size: width of the logits.
        no_region: classes of blocks that cannot be a compile region, because two of their inputs are views
            of one tensor (GPT-J's sine and cosine).
        same_inputs: names of its linear layers, those together that get the same input.
    """

    layers: tuple[AttentionLayer, ...]
    vocab_size: int
    no_region: frozenset[type[nn.Module]]
    same_inputs: tuple[tuple[str, ...], ...]


def check_model(module: nn.Module, dtype: torch.dtype, device: torch.device) -> CheckResult:
    """Runs the check; leaves the module as it was.

    Args:
        module: in eval mode, its attention implementation ours.
        dtype: that the model was loaded in.

    Raises:
        UnsupportedError: names the model's class and what is wrong.
        ModelError: its logits are not finite.
    """
    name = type(module).__name__
    try:
        with torch.no_grad():
            return _check(module, dtype, device)
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedError as error:
        raise UnsupportedError(f"{name} is not supported: {error}") from None
    except CompspecError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{name} is not supported: it fails under compspec's attention ({type(error).__name__}: {one_line(error)})"
        ) from error


def _check(module: Any, dtype: torch.dtype, device: torch.device) -> CheckResult:
    config = text_config(module)
    if not module._can_set_attn_implementation():
        raise UnsupportedError(
            "its attention is not built on transformers' attention interface, so it cannot be replaced"
        )
    sequences = _sequences(config.vocab_size, device)
    with _aliased_inputs(module) as no_region, same_inputs(module) as groups:
        packed, layers = _packed_logits(module, sequences, dtype)
    _check_layers(layers, config)
    with _attention(module, "eager"):
        eager = torch.cat([_eager_logits(module, ids) for ids in sequences])
    if not eager.isfinite().all():
        raise ModelError(
            f"{type(module).__name__} computes logits that are not finite in {dtype}; "
            "set model.dtype to bfloat16 or float32, or get a sound checkpoint"
        )
    tolerance = TOLERANCE[dtype]
    error = relative_error(packed, eager)
    if not error <= tolerance:
        # One more forward per sequence, to name the reason.
        separate = torch.cat([_packed_logits(module, [ids], dtype)[0] for ids in sequences])
        alone = relative_error(separate, eager)
        what = "two sequences packed into one forward change each other"
        if not alone <= tolerance:
            what = "compspec's attention computes something else than its own"
        raise UnsupportedError(f"{what} (logits differ by {error:.2g} of their size)")
    return CheckResult(
        layers=tuple(layers),
        vocab_size=packed.shape[-1],
        no_region=frozenset(no_region),
        same_inputs=tuple(groups),
    )


def _sequences(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Two short sequences of fixed ids."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).to(device) for length in _LENGTHS]


def _packed_logits(
    module: nn.Module, sequences: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, list[AttentionLayer]]:
    """Logits of all rows of the sequences, run in one forward, and the layers that ran."""
    device = sequences[0].device
    rows = max(len(ids) for ids in sequences)
    num_blocks = -(-rows // _BLOCK_SIZE)
    # Blocks in reverse order: a page table that is ignored is noticed. Block 0 takes the padding.
    table = torch.arange(len(sequences) * num_blocks, 0, -1).view(len(sequences), num_blocks)
    ids = torch.zeros(len(sequences), rows, dtype=torch.int64)
    positions, slots = torch.zeros_like(ids), torch.zeros_like(ids)
    keep = []
    for index, sequence in enumerate(sequences):
        at = torch.arange(len(sequence))
        ids[index, at] = sequence.cpu()
        positions[index, at] = at
        slots[index, at] = table[index, at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE
        keep.append(index * rows + at)
    names = {id(part): name for name, part in module.named_modules()}
    probe = Probe(names, dtype, (table.numel() + 1) * _BLOCK_SIZE)
    flat_positions = positions.view(1, -1).to(device)
    with _attention(module, PROBE_NAME):
        logits = run_module(
            module,
            slices_logits(module),
            ids.view(1, -1).to(device),
            flat_positions,
            torch.cat(keep).to(device),
            slot_mapping=slots.view(-1).to(device),
            block_table=table.to(device, torch.int32),
            seq_lens=torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int32, device=device),
            query_positions=flat_positions[0].clone(),
            block_size=_BLOCK_SIZE,
            compspec_probe=probe,
        )
    return logits, probe.layers


def _eager_logits(module: nn.Module, ids: Tensor) -> Tensor:
    positions = torch.arange(len(ids), device=ids.device)
    logits: Tensor = module(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits


def _check_layers(layers: list[AttentionLayer], config: Any) -> None:
    """Each attention layer must have called our function exactly once."""
    expected = int(config.num_hidden_layers)
    if not layers:
        raise UnsupportedError("it never calls the attention function it is given, so its attention is not compspec's")
    if len({id(layer.module) for layer in layers}) < len(layers):
        raise UnsupportedError("one attention module runs several times in a forward, so layers would share a KV cache")
    if len(layers) != expected:
        raise UnsupportedError(f"{len(layers)} of its {expected} layers call the attention function")
    for index, layer in enumerate(layers):
        window = _configured_window(config, index)
        if layer.spec.window != window:
            raise UnsupportedError(
                f"layer {index} asks for a window of {layer.spec.window} tokens where its config says {window} (0: all)"
            )


def _configured_window(config: Any, index: int) -> int:
    """The window of a layer by the config, from which transformers makes the mask of its own attention.

    The sequences of this check are shorter than any window, so this is what stands for it.
    """
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[index] == "sliding_attention"
    return int(getattr(config, "sliding_window", None) or 0) if slides else 0


def relative_error(a: Tensor, b: Tensor) -> float:
    """Error of a row relative to the size of its logits, at the quantile of rows that must agree."""
    if a.shape != b.shape:
        raise UnsupportedError(f"its logits have shape {tuple(a.shape)}, expected {tuple(b.shape)}")
    a, b = (x.float() - x.float().mean(-1, keepdim=True) for x in (a, b))
    error = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-6)
    return float(error.nan_to_num(nan=float("inf")).quantile(_ROWS_THAT_MUST_AGREE, interpolation="higher"))


@contextmanager
def _aliased_inputs(module: nn.Module) -> Iterator[set[type[nn.Module]]]:
    """Collects the classes of indivisible blocks that get two different views of one tensor."""
    named = set(getattr(module, "_no_split_modules", None) or ())
    found: set[type[nn.Module]] = set()

    def look(block: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        storages = [tensor.untyped_storage().data_ptr() for tensor in inputs.values()]
        if len(set(storages)) < len(storages):
            found.add(type(block))

    blocks = [part for part in module.modules() if type(part).__name__ in named]
    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _attention(module: Any, name: str) -> Iterator[None]:
    """Runs the module with another attention implementation for a while."""
    before = module.config._attn_implementation
    with quiet_transformers():
        module.set_attn_implementation(name)
        try:
            yield
        finally:
            module.set_attn_implementation(before)
