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


class Chain(nn.Module):
    """Some modules of a model, applied one after another; it can be traced by itself."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], is_head: bool) -> None:
        super().__init__()
        self.model, self.is_head = model, is_head
        self.train(model.training)
        self._names = names

    def forward(self, x: Tensor) -> Tensor:
        for name in self._names:
            x = self.model.get_submodule(name)(x)
        return x


def chains_of(model: nn.Module, block: ModelBlock) -> list[Chain]:
    """The modules of a block, and in training its head, if it has one."""
    names = tuple(name for name in block.modules if name != block.head or not name)
    heads = [Chain(model, (block.head,), is_head=True)] if block.head and model.training else []
    return [Chain(model, names, is_head=False), *heads]


def own_name(path: str) -> str:
    """The name that a module of a chain has in the model."""
    return path.removeprefix("model").removeprefix(".") or "the model"


def make_forward(
    model: nn.Module, block: ModelBlock, is_last: bool, prepare: Callable[[Chain], nn.Module]
) -> Callable[[Tensor], Heads]:
    """The function that computes a block: its output, and in training the logits of its head.

    `prepare` makes of each chain of its modules what is called.
    """
    main, *heads = (prepare(chain) for chain in chains_of(model, block))

    def forward(x: Tensor) -> Heads:
        x = main(x)
        outputs = (x, *(head(x).float().contiguous() for head in heads))
        return (x.float().contiguous(), *outputs[1:]) if is_last else outputs

    return forward


def _is_in_order(chain: nn.Sequential) -> bool:
    kind = type(chain)
    return kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__


def _has_product(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv2d | nn.Linear) for part in module.modules())
