"""A chain of layers with times that are easy to add up, and a cluster to run it on."""

from lockstep.spec import Optimizer, Run, Train
from lockstep.spec.cluster import Cluster, LinkRate, NetworkRate, NodeShape, WorkerSpeed
from lockstep.spec.profile import LanesTime, LayerProfile, LayerTime, Profile

LAYER_S = 0.010  # of a lane, forward; twice that backward


def chain(layers=8, parameters=1_000_000, lanes=8, images=4, fixed_s=0.0, device="test"):
    """Equal layers; a step of n lanes takes n times as long as all of them, and `fixed_s`."""
    lane_s = layers * 3 * LAYER_S
    return Profile(
        "chain", (3, 32, 32), 10, "fp32", "stock",
        tuple(
            LayerProfile(
                f"layer{i}", "convolution", 1e6, parameters, 1000, 1000, rows=32, channels=64, halo=1,
                times=(LayerTime(images, LAYER_S, 2 * LAYER_S),),
            )
            for i in range(layers)
        ),
        device=device,
        lanes=tuple(LanesTime(n, images, fixed_s + n * lane_s) for n in (1, lanes // 2, lanes)),
        update_s=fixed_s / 2,
        train_images=3200,
    )  # fmt: skip


def cluster(workers=8, kind="cpu", gb_s=1.0, latency_us=0.0, network=None, memory_gb=16.0, slowdown=(1.0,)):
    speed = WorkerSpeed(kind, "test", memory_gb, 10.0, {"fp32": 100.0}, slowdown=slowdown)
    return Cluster("test", speed, NodeShape(workers, LinkRate(latency_us, gb_s)), network)


def network(gb_s=1.0, latency_us=0.0, **more):
    return NetworkRate(latency_us, gb_s, **more)


def run_of(lanes=8, images=4, optimizer="momentum", **train):
    return Run(train=Train(batch=lanes * images, lanes=lanes, **train), optimizer=Optimizer(optimizer))
