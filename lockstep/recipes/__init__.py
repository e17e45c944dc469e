"""Recipes: named functions that return a Run."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.errors import SpecError, unknown
from lockstep.recipes.vision import cifar10, emotion, fashion, finetune, folder, imagenet, mnist, shapes
from lockstep.spec import Run

RECIPES: dict[str, Callable[[], Run]] = {
    function.__name__: function
    for function in (shapes, mnist, fashion, cifar10, emotion, folder, finetune, imagenet)
}


def recipe(name: str) -> Run:
    """The Run of a recipe by its name."""
    if name not in RECIPES:
        raise SpecError(f"{unknown('recipe', name, RECIPES)}; a model goes by -o model.name=NAME")
    return RECIPES[name]()
