"""A plugin of pytest that tells a failure when it happens, for runs that may be cut short."""


def pytest_sessionstart(session):
    session.config.pluginmanager.register(Told(session.config.pluginmanager.get_plugin("terminalreporter")))


class Told:
    def __init__(self, reporter):
        self._reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._reporter.write_line(f"\n{report.nodeid}\n{report.longreprtext}")
