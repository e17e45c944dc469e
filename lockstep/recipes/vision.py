"""Recipes for image classification; each docstring says what it reaches."""

from __future__ import annotations

from lockstep.spec import Data, Model, Optimizer, Run, Schedule, Train


def shapes() -> Run:
    """LeNet-5 on procedural shapes: the embedded default, no download, about a minute on one core."""
    return Run(
        model=Model("lenet5"),
        data=Data("shapes"),
        train=Train(epochs=8, batch=256, lanes=8),
        optimizer=Optimizer("momentum", lr=0.05, weight_decay=1e-4),
        schedule=Schedule("cosine", warmup_epochs=1),
    )


def mnist() -> Run:
    """LeNet-5 on MNIST."""
    return Run(
        model=Model("lenet5"),
        data=Data("mnist"),
        train=Train(epochs=6, batch=256, lanes=8),
        optimizer=Optimizer("momentum", lr=0.05, weight_decay=1e-4),
        schedule=Schedule("cosine", warmup_epochs=1),
    )


def fashion() -> Run:
    """emotion48 on Fashion-MNIST: at least 91 % test accuracy."""
    return Run(
        model=Model("emotion48", options={"dropout": 0.3}),
        data=Data("fashion", augment=("flip",)),
        train=Train(epochs=10, batch=256, lanes=8, channels_last=True),
        optimizer=Optimizer("nag", lr=0.1, weight_decay=5e-4),
        schedule=Schedule("onecycle"),
    )


def cifar10() -> Run:
    """ResNet-18 on CIFAR-10: at least 93 % test accuracy in 20 epochs on one GPU."""
    return Run(
        model=Model("resnet18"),
        data=Data("cifar10", augment=("flip", "crop:4", "cutout:8")),
        train=Train(epochs=20, batch=256, lanes=4, precision="bf16", label_smoothing=0.1, channels_last=True),
        optimizer=Optimizer("nag", lr=0.2, weight_decay=5e-4),
        schedule=Schedule("onecycle"),
    )


def emotion() -> Run:
    """emotion48 at its own size, 48×48 grey and seven classes, on procedural shapes."""
    return Run(
        model=Model("emotion48"),
        data=Data("shapes", options={"size": 48, "classes": 7, "num_train": 7168, "num_test": 1024}),
        train=Train(epochs=4, batch=256, lanes=8, channels_last=True),
        optimizer=Optimizer("momentum", lr=0.05, weight_decay=1e-4),
        schedule=Schedule("cosine", warmup_epochs=1),
    )


def folder() -> Run:
    """ResNet-18 on your own images: `-o data.dir=PHOTOS` with one folder a class.

    At 96 pixels, where the model takes its ImageNet stem: 0.33 billion multiplications an image. At 64
    pixels it takes the stem for small images: 2.2 billion.
    """
    return Run(
        model=Model("resnet18"),
        data=Data("folder", augment=("flip", "crop"), options={"size": 96}),
        train=Train(epochs=20, batch=32, lanes=2, channels_last=True, label_smoothing=0.1),
        optimizer=Optimizer("nag", lr=0.01, weight_decay=5e-4),
        schedule=Schedule("cosine", warmup_epochs=1),
    )


def finetune() -> Run:
    """Published weights trained further on your own images: `-o data.dir=PHOTOS` with one folder a class.

    ResNet-18 at 224 pixels, its last layer at ten times the rate of the others. timm downloads the weights;
    `-o model.weights=FILE.safetensors` or `--fork RUN` starts from others.
    """
    return Run(
        model=Model("resnet18", weights="pretrained"),
        data=Data("folder", augment=("random_resized_crop:0.35:1", "flip"), options={"size": 224}),
        train=Train(epochs=20, batch=32, lanes=2, channels_last=True, label_smoothing=0.1),
        optimizer=Optimizer("nag", lr=0.005, weight_decay=1e-4, rates=("head:10",)),
        schedule=Schedule("cosine", warmup_epochs=1),
    )


def imagenet() -> Run:
    """ResNet-50 on ImageNet at 224 pixels, 18 epochs: `-o data.dir=IMAGENET` with train/ and val/.

    The settings are those of FFCV's rn50 configurations (github.com/libffcv/ffcv-imagenet): 1.7 for 8 GPUs of
    512 is 0.425 for 1024; weight decay 1e-4 but none of norms; label smoothing 0.1; the rate rises for two
    epochs and falls to 0. Theirs have 160 to 192 pixels and blurred pooling. ImageNet was not at hand, so
    nothing about the accuracy here is proven.
    """
    return Run(
        model=Model("resnet50"),
        data=Data("folder", augment=("random_resized_crop", "flip"), options={"size": 224}),
        train=Train(
            epochs=18, batch=1024, lanes=8, precision="bf16", label_smoothing=0.1, channels_last=True
        ),
        optimizer=Optimizer("momentum", lr=0.425, weight_decay=1e-4, decay_norms=False),
        schedule=Schedule("onecycle", options={"peak": 2 / 18, "start": 1e-4}),
    )
