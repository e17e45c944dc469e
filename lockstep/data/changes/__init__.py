"""Changes the colours, the geometry and regions of uint8 images, as a function of seed, epoch and sample.

Data pipeline: store → order → changes → augment → loader. Changes have a fixed order, whatever the order of
the items in `data.augment`:

    rand_augment, trivial_augment, color_jitter, grayscale, gaussian_blur, random_erasing

A sample's bytes depend on (seed, epoch, id) and its own pixels alone. Pixels are computed in integers, by
tables, shifts, gathers and exact sums. What needs a sine, an exponential or a logarithm is a table of a few
values, computed by Python's `math` and rounded to fixed point. So neither the batch nor the place in it nor
the device can change a byte.

Shapes: N images, C channels (1 or 3), H, W pixels. What is drawn for a batch is a tensor [N] on the host, so
which samples an operation takes is known without waiting for a device.
"""

from lockstep.data.changes.changes import Changes

__all__ = ["Changes"]
