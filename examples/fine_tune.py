"""Fine-tune: start from the weights of a finished run; a head of another size starts anew."""

from pathlib import Path

import lockstep


def shapes(classes: int) -> lockstep.Data:
    options = {"size": 20, "classes": classes, "num_train": 2048, "num_test": 256}
    return lockstep.Data("shapes", options=options)


first = lockstep.train(
    lockstep.Run(data=shapes(8), train=lockstep.Train(epochs=8, batch=128, lanes=4)),
    launch=lockstep.Launch(name="eight-classes"),
)
weights = sorted(Path(first.directory, "checkpoints").glob("*.safetensors"))[-1]
tuned = lockstep.train(
    lockstep.Run(
        model=lockstep.Model("lenet5", weights=str(weights)),
        data=shapes(4),
        train=lockstep.Train(epochs=2, batch=128, lanes=4),
        optimizer=lockstep.Optimizer("momentum", lr=0.02),
    ),
    launch=lockstep.Launch(name="four-classes"),
)
print(f"{100 * tuned.summary['accuracy']:.1f} % on four classes after two epochs")
