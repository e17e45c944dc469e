"""The same training step in JAX: Flax models, Optax's SGD, one jit with donated state, data on the device.

Timed by time_job.py in a process without torch. Weights are fp32, `dtype` is what is computed in.
Shapes: images uint8 [num_images, H, W, C], labels and order [num_images].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from case import Case
from flax import linen as nn
from jax import Array

LR, MOMENTUM = 1e-3, 0.9


class Emotion48(nn.Module):
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (32, 64, 128):
            x = nn.relu(nn.Conv(width, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(256, dtype=self.dtype)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


class ResNet18(nn.Module):
    """With the stem for small images."""

    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = nn.relu(norm()(conv(64, (3, 3))(x)))
        for number in range(8):
            width, stride = 64 << number // 2, 2 if number in (2, 4, 6) else 1
            main = nn.relu(norm()(conv(width, (3, 3), stride, padding=1)(x)))
            main = norm()(conv(width, (3, 3))(main))
            shortcut = x if stride == 1 else norm()(conv(width, (1, 1), stride)(x))
            x = nn.relu(main + shortcut)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x.mean((1, 2)))


MODELS: dict[str, Callable[..., nn.Module]] = {"emotion48": Emotion48, "resnet18": ResNet18}


def jax_step(case: Case, device: str) -> Callable[[], Array]:
    """The step; its loss is waited for by `block_until_ready`."""
    if case.model not in MODELS or (case.model == "resnet18" and case.size >= 96):
        raise NotImplementedError(f"{case.model} at {case.size} pixels is not written in Flax")
    jax.config.update("jax_platforms", device)
    dtype = jnp.bfloat16 if case.precision == "bf16" else jnp.float32
    model = MODELS[case.model](case.num_classes, dtype)
    optimizer = optax.sgd(LR, MOMENTUM)
    seeds = iter(jax.random.split(jax.random.key(0), 3))
    shape = (case.size, case.size, case.in_channels)
    images = jax.random.bits(next(seeds), (case.num_images, *shape), jnp.uint8)
    labels = jax.random.randint(next(seeds), (case.num_images,), 0, case.num_classes)
    variables = dict(jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, *shape))))
    params = variables.pop("params")
    state = params, variables, optimizer.init(params), jnp.zeros((), jnp.int32)

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, images: Array, labels: Array, order: Array) -> tuple[Any, Array]:
        params, statistics, memory, cursor = state
        indices = jax.lax.dynamic_slice(order, (cursor,), (case.batch,))
        batch = images.at[indices].get(mode="promise_in_bounds").astype(jnp.float32) * (1 / 63.75) - 2.0
        targets = labels.at[indices].get(mode="promise_in_bounds")

        def loss_of(params: Any) -> tuple[Array, Any]:
            logits, changed = model.apply({"params": params, **statistics}, batch, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
            return losses.mean(), dict(changed)

        (loss, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        change, memory = optimizer.update(grads, memory, params)
        cursor = (cursor + case.batch) % (case.num_batches * case.batch)
        return (optax.apply_updates(params, change), statistics, memory, cursor), loss

    permute = jax.jit(lambda key: jax.random.permutation(key, case.num_images))
    key, order, number = next(seeds), None, 0

    def step() -> Array:
        nonlocal state, order, number
        if number % case.num_batches == 0:
            order = permute(jax.random.fold_in(key, number))
        number += 1
        state, loss = update(state, images, labels, order)
        return loss

    return step
