"""The thread fixture must really catch a leak, or every other test passes for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.mark.parametrize("daemon", [True, False])
def test_a_leaked_thread_fails_its_test(pytester, daemon):
    conftest = CONFTEST.read_text()
    impatient = conftest.replace("THREAD_GRACE_S = 20.0", "THREAD_GRACE_S = 0.1")
    assert impatient != conftest
    pytester.makeconftest(impatient)
    pytester.makepyfile(
        f"""
        import threading

        stop = threading.Event()

        def test_leaks():
            threading.Thread(target=stop.wait, name="left-behind", daemon={daemon}).start()

        def test_ends_what_it_starts():
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()

        def test_last():
            stop.set()
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*threads started in this test still run*left-behind*"])
