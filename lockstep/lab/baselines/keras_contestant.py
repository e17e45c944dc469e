"""TensorFlow: a Keras model, compiled and fitted as its users do."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

from lockstep.errors import BadInput
from lockstep.lab.baselines.baseline_task import CLASSES, SIDE, Array, BaselineTask
from lockstep.lab.baselines.contest import race


class _EachLoss(keras.callbacks.Callback):  # type: ignore[misc]
    """Keras tells the mean of an epoch's steps so far; from it follows the loss of each."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self._sum = list[float](), 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        before = self._sum if batch else 0.0
        self._sum = float((logs or {})["loss"]) * (batch + 1)
        self.losses.append(self._sum - before)


class KerasContestant:
    """`fit` an epoch after another, each with its images in order."""

    def __init__(self, task: BaselineTask) -> None:
        if keras.backend.backend() == "tensorflow":
            _set_up_tensorflow(task)
        if task.precision == "bf16":
            keras.mixed_precision.set_global_policy("mixed_bfloat16")
        self.precision, self._batch, layers = task.precision, task.batch, keras.layers
        blocks = [
            layer
            for filters in (32, 64, 128)
            for layer in (
                layers.Conv2D(filters, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(2),
            )
        ]
        ends = [
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(CLASSES, dtype="float32"),
        ]
        self._model = keras.Sequential([keras.Input((SIDE, SIDE, 1)), *blocks, *ends])
        self._model.set_weights(task.channels_last_weights())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(keras.optimizers.SGD(task.rate), loss)
        self._images, self._labels = task.array("images").transpose(0, 2, 3, 1), task.array("labels")

    def warm_up(self) -> None:
        """A step, and a prediction; then the weights as before."""
        before = [np.array(weight) for weight in self._model.get_weights()]
        self.train(np.arange(self._batch).reshape(1, 1, -1))
        self._model.set_weights(before)

    def train(self, order: Array) -> list[float]:
        found = _EachLoss()
        for epoch in order:
            ids = epoch.ravel()
            self._model.fit(
                self._images[ids],
                self._labels[ids],
                batch_size=self._batch,
                shuffle=False,
                verbose=0,
                callbacks=[found],
            )
        return found.losses

    def predict(self, images: Array) -> Array:
        return np.asarray(self._model.predict_on_batch(images.transpose(0, 2, 3, 1)))


def _set_up_tensorflow(task: BaselineTask) -> None:
    import tensorflow

    if task.device == "cuda" and not tensorflow.config.list_physical_devices("GPU"):
        raise BadInput("TensorFlow sees no GPU: install tensorflow[and-cuda]")
    tensorflow.config.threading.set_intra_op_parallelism_threads(task.cores)
    tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    tensorflow.config.experimental.enable_tensor_float_32_execution(task.precision == "tf32")


if __name__ == "__main__":
    race(KerasContestant)
