"""What a pixel cache will hold of a run's images, in a sentence."""

from __future__ import annotations

from lockstep.data.feeding import feeding
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.images.pixel_cache import slot_bytes
from lockstep.data.store import Store
from lockstep.spec.run import Run


def explain_cache(run: Run, store: Store) -> tuple[str, ...]:
    """For the user, if there is a cache that does not hold all images."""
    space = feeding().cache
    if not space:
        return ()
    if not isinstance(store.train, EncodedSplit):
        return (f"--pixel-cache keeps nothing: the images of {store.name} are not decoded from files",)
    if any(item.startswith("random_resized_crop") for item in run.data.augment):
        return (
            "--pixel-cache keeps evaluation images only: random_resized_crop reads another box of a training "
            "image every time; `lockstep data pack --raw --size N` saves decoding there",
        )
    count = min(space.num_bytes // slot_bytes(store.shape), len(store.train))
    if count == len(store.train):
        return ()
    return (
        f"--pixel-cache-gb {space.num_bytes / 1e9:g} has room for {count:,} of {len(store.train):,} training "
        "images: the others are decoded every time",
    )
