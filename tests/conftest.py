"""The order of tests: long groups first, so that two processes end at about the same time."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
