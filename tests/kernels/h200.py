"""An NVIDIA H200 as far as Triton's compiler asks for one, which needs no GPU."""

from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)


class H200:
    """A driver that starts nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET
