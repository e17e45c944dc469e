"""Train a recipe from Python, changed in two places, and look at what it reported."""

from dataclasses import replace

import lockstep

run = lockstep.recipe("shapes")
run = replace(
    run,
    seed=1,
    data=lockstep.Data("shapes", options={"size": 20, "classes": 4, "num_train": 2048, "num_test": 256}),
    train=lockstep.Train(epochs=6, batch=128, lanes=4),
)
result = lockstep.train(run, launch=lockstep.Launch(name="from-python"))
print(f"{100 * result.summary['accuracy']:.1f} % after {result.summary['steps']} steps")
print("the same bits on every machine like this one:", result.summary["weights_sha256"])
