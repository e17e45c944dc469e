"""JAX: a pure function of parameters, its gradient by jax.value_and_grad, a step compiled by jax.jit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.errors import BadInput
from lockstep.lab.baselines.baseline_task import Array, BaselineTask
from lockstep.lab.baselines.contest import race

_PRECISION = {"fp32": "highest", "tf32": "tensorfloat32", "bf16": "default"}


def _scores(parameters: list[Any], images: Any, kind: Any) -> Any:
    """[N, H, W, C] → [N, classes]; computes in `kind`."""
    values = images.astype(kind)
    *layers, (hidden, hidden_bias), (last, last_bias) = zip(parameters[::2], parameters[1::2], strict=True)
    for weight, bias in layers:
        values = lax.conv_general_dilated(
            values, weight.astype(kind), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        values = jax.nn.relu(values + bias.astype(kind))
        values = lax.reduce_window(values, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    values = values.reshape(len(values), -1)
    values = jax.nn.relu(values @ hidden.astype(kind) + hidden_bias.astype(kind))
    return (values @ last.astype(kind) + last_bias.astype(kind)).astype(jnp.float32)


class JaxContestant:
    """Images stay on the device; the old parameters' memory is used for the new ones."""

    def __init__(self, task: BaselineTask) -> None:
        if task.device == "cuda" and jax.default_backend() != "gpu":
            raise BadInput("JAX sees no GPU: install jax[cuda12] or jax[cuda13]")
        self.precision, self._batch = task.precision, task.batch
        jax.config.update("jax_default_matmul_precision", _PRECISION[task.precision])
        kind = jnp.bfloat16 if task.precision == "bf16" else jnp.float32
        self._parameters = [jnp.asarray(weight) for weight in task.channels_last_weights()]
        self._images = jnp.asarray(task.array("images").transpose(0, 2, 3, 1))
        self._labels = jnp.asarray(task.array("labels").astype(np.int32))
        self._predict = jax.jit(partial(_scores, kind=kind))

        def find_loss(parameters: list[Any], images: Any, labels: Any) -> Any:
            chances = jax.nn.log_softmax(_scores(parameters, images, kind))
            return -jnp.take_along_axis(chances, labels[:, None], 1).mean()

        def step(parameters: list[Any], images: Any, labels: Any, ids: Any) -> Any:
            loss, gradients = jax.value_and_grad(find_loss)(parameters, images[ids], labels[ids])
            return jax.tree.map(lambda old, slope: old - task.rate * slope, parameters, gradients), loss

        self._step = jax.jit(step, donate_argnums=0)

    def warm_up(self) -> None:
        """A step with a copy of the parameters."""
        copy = [weight.copy() for weight in self._parameters]
        jax.block_until_ready(self._step(copy, self._images, self._labels, jnp.arange(self._batch)))

    def train(self, order: Array) -> list[float]:
        losses = []
        for ids in jnp.asarray(order.reshape(-1, self._batch)):
            self._parameters, loss = self._step(self._parameters, self._images, self._labels, ids)
            losses.append(loss)
        jax.block_until_ready(self._parameters)
        return [float(loss) for loss in losses]

    def predict(self, images: Array) -> Array:
        return np.asarray(self._predict(self._parameters, images.transpose(0, 2, 3, 1)))


if __name__ == "__main__":
    race(JaxContestant)
