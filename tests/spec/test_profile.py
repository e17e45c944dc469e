"""A Profile's file, old ones too, and where a layer leaves its roofline as the batch shrinks."""

import json
from dataclasses import replace

from layer_chain import chain

from lockstep.cli.foresight.layer_table import heavy_rates, tell_layers
from lockstep.spec.profile import LayerProfile, LayerTime, LoadTime, Profile, read_profile, write_profile

TIMES = {1: 0.010, 4: 0.016, 16: 0.040, 64: 0.150}  # 100, 250, 400 and 427 images a second


def layer(times):
    every = (LayerTime(images, seconds / 4, 3 * seconds / 4) for images, seconds in times.items())
    part = LayerTime(1, 1e-9, 1e-9, "channel=2")
    return LayerProfile("conv", "convolution", 1e6, 1000, 3000, 2000, times=(*every, part))


def profile(times=TIMES, loading=()):
    return Profile("m", (3, 32, 32), 10, "fp32", "stock", (layer(times),) * 2, device="test", loading=loading)


def test_the_fewest_images_with_a_share_of_the_best_rate():
    assert layer(TIMES).fewest_images(0.8) == 16
    assert layer(TIMES).fewest_images(0.5) == 4
    assert layer({1: 0.01, 4: 0.04, 16: 0.16}).fewest_images(0.8) == 1  # no cost of its own to start
    assert layer({4: 0.01, 16: 0.05}).relative_rates == {4: 1.0, 16: 0.8}  # larger can be slower


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "p.json"
    written = profile(loading=(LoadTime(1, 0.001), LoadTime(4, 0.002)))
    write_profile(path, written)
    assert read_profile(path) == written


def test_a_file_from_before_loading_was_measured(tmp_path):
    path = tmp_path / "p.json"
    write_profile(path, chain())
    table = json.loads(path.read_text())
    del table["loading"]
    path.write_text(json.dumps(table))
    assert read_profile(path) == chain() and chain().loading == ()


def test_the_table_has_flops_bytes_memory_and_loading():
    lines = tell_layers(profile(loading=tuple(LoadTime(images, 0.01 * images) for images in TIMES)))
    columns = ["conv", "convolution", "1,000", "384.0", "3.85", "0.78"]  # 64 images, backward twice forward
    columns += ["37.50", "112.50", "2.6", "50.0", "%", "16"]
    assert lines[2].split() == columns
    assert lines[1].split()[3] == "256.0"  # the images need no gradient
    assert ["16", "80.00", "200", "160.00", "66.7"] in [line.split() for line in lines]


def test_equal_layers_are_one_line_of_the_picture():
    other = replace(layer({1: 0.1, 4: 0.1, 16: 0.1, 64: 0.1}), name="fc")
    mixed = replace(profile(), layers=(layer(TIMES), other, replace(layer(TIMES), name="conv2")))
    assert list(heavy_rates(mixed, 2)) == ["conv and 1 like it", "fc"]
    assert heavy_rates(mixed, 1) == {"conv and 1 like it": [layer(TIMES).relative_rates[n] for n in TIMES]}


def test_one_batch_says_nothing_of_rooflines():
    lines = tell_layers(profile({8: 0.01}))
    assert "from" not in lines[0] and not any("loading" in line for line in lines)
