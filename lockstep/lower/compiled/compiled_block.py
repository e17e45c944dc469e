"""Compiled model, its blocks: each is compiled by itself, whatever the plan; a pipeline's stage has some.

A block begins with a product (a convolution, a fully connected layer, or a module with such layers), whose
input is in memory anyway. So nothing that torch's compiler could fuse is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.lower.program import Block
from lockstep.models.block import BlockModel
from lockstep.models.googlenet import GoogLeNet

Heads = tuple[Tensor, ...]  # the main output of a block or of the model, then logits of other heads


@dataclass(frozen=True)
class ModelBlock(Block):
    """Modules that are applied one after another; in training `head` reads the output, if there is one."""

    head: str = ""


def find_blocks(model: nn.Module) -> tuple[ModelBlock, ...]:
    """The blocks of a model; one of a form that is not known is one block."""
    forward, chain, path = type(model).forward, model, ""
    heads: nn.Module | None = None
    if isinstance(model, BlockModel) and forward in (BlockModel.forward, GoogLeNet.forward):
        chain, path = model.blocks, "blocks."
        heads = model.aux if isinstance(model, GoogLeNet) else None
    if not isinstance(chain, nn.Sequential) or not _is_in_order(chain):
        return (ModelBlock(("",)),)
    found: list[ModelBlock] = []
    complete = True  # whether a product begins another block
    for name, module in chain._modules.items():
        own: tuple[str, ...] = (f"{path}{name}",)
        is_product = module is not None and _has_product(module)
        if found and not (found[-1].head or (is_product and complete)):
            own, is_product = (*found.pop().modules, *own), is_product or complete
        complete = is_product
        head = f"aux.{name}" if heads is not None and name in heads._modules else ""
        found.append(ModelBlock((*own, *([head] if head else [])), head))
    return tuple(found)


def make_forward(model: nn.Module, block: ModelBlock, is_last: bool) -> Callable[[Tensor], Heads]:
    """The function that computes a block: its output, and in training the logits of its head."""
    modules = [model.get_submodule(name) for name in block.modules if name != block.head or not name]
    head = model.get_submodule(block.head) if block.head and model.training else None

    def forward(x: Tensor) -> Heads:
        for module in modules:
            x = module(x)
        outputs = (x,) if head is None else (x, head(x).float().contiguous())
        return (x.float().contiguous(), *outputs[1:]) if is_last else outputs

    return forward


def _is_in_order(chain: nn.Sequential) -> bool:
    kind = type(chain)
    return kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__


def _has_product(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv2d | nn.Linear) for part in module.modules())
